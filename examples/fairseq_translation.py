"""fairseq from text to translations with DSQ: dsq-preprocess, dsq-train and dsq-generate on generated sentences.

    python examples/fairseq_translation.py

The target language is the source language in capitals with the verb last. Training starts with a stash of 3 bits, and
the level rises at a plateau. The example prints the commands of fairseq_plugin that it runs.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOUNS = ["hund", "katze", "vogel", "fisch", "baum", "haus", "kind", "buch"]
VERBS = ["sieht", "findet", "nimmt", "kennt"]
MODEL = """--arch transformer --encoder-layers 1 --decoder-layers 1 --share-decoder-input-output-embed
    --encoder-embed-dim 64 --encoder-ffn-embed-dim 128 --encoder-attention-heads 2
    --decoder-embed-dim 64 --decoder-ffn-embed-dim 128 --decoder-attention-heads 2"""
TRAINING = """--criterion label_smoothed_cross_entropy --optimizer adam --lr 0.003 --dropout 0 --max-tokens 400
    --no-epoch-checkpoints --num-workers 0 --cpu --log-format simple"""
DSQ = ["--dsq-levels", "[4,3,3,8] [8,4,4,8]", "--dsq-patience", "2", "--dsq-threshold", "0.02"]


def write_pairs(prefix: Path, count: int, draw: random.Random) -> None:
    sources, targets = [], []
    for _ in range(count):
        subject, verb, objects = draw.choice(NOUNS), draw.choice(VERBS), draw.choices(NOUNS, k=draw.randint(1, 3))
        sources.append(" ".join([subject, verb, *objects]))
        targets.append(" ".join([subject, *objects, verb]).upper())
    prefix.with_suffix(".de").write_text("\n".join(sources) + "\n")
    prefix.with_suffix(".xx").write_text("\n".join(targets) + "\n")


def dsq(command: str, *arguments: object) -> str:
    """Run dsq-COMMAND; returns what it printed."""
    program = [sys.executable, "-m", "fairseq_plugin.commands", command, *map(str, arguments)]
    print(f"dsq-{command}", *program[4:], flush=True)
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def main(epochs: int = 40) -> list[dict]:
    """Train and translate; returns the validations of the run: update, level and loss."""
    with tempfile.TemporaryDirectory() as name:
        folder, draw = Path(name), random.Random(1)
        for split, count in {"train": 400, "valid": 50, "test": 20}.items():
            write_pairs(folder / split, count, draw)
        prefixes = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
        data, run = folder / "data", folder / "run"
        dsq("preprocess", "-s", "de", "-t", "xx", *prefixes, "--destdir", data)
        dsq("train", data, *MODEL.split(), *TRAINING.split(), *DSQ, "--max-epoch", epochs, "--save-dir", run)
        history = json.loads((run / "dsq_history.json").read_text())
        for validation in history["validations"][:: max(epochs // 10, 1)]:
            print("update {update}: level {level}, validation loss {loss:.3f}".format(**validation))
        for level in filter(lambda level: level["updates"], history["levels"]):
            print(f"{level['precision']}: {level['updates']} updates")
        translated = dsq("generate", data, "--path", run / "checkpoint_best.pt", "--beam", "4", "--cpu")
        print(*[line for line in translated.splitlines() if line[:2] in ("S-", "T-", "D-")][:6], sep="\n")
        print(translated.splitlines()[-1])
    return history["validations"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    main(parser.parse_args().epochs)
