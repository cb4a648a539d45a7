"""Archives of the forms that the official ones have, and a pretrained RoBERTa of fairseq's, in miniature."""

import io
import json
import tarfile
import zipfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch

Pairs = list[tuple[str, str]]


def archive(path: Path, members: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def segments(*sentences: str) -> str:
    lines = "".join(f'<seg id="{i}"> {sentence} </seg>\n' for i, sentence in enumerate(sentences, start=1))
    return f'<?xml version="1.0"?>\n<doc docid="1">\n<title>x</title>\n{lines}</doc>\n'


def iwslt(path: Path, year: int, sets: list[str], training: Pairs, held_out: Pairs) -> Path:
    """``sets``: the names of the test sets, as in TED.dev2010; each holds all of ``held_out``."""
    members = {}
    for side, language in enumerate(("de", "en")):
        lines = "".join(f"{pair[side]}\n" for pair in training)
        members[f"de-en/train.tags.de-en.{language}"] = f"<url>u</url>\n<title>t</title>\n{lines}"
        for name in sets:
            text = segments(*(pair[side] for pair in held_out))
            members[f"de-en/IWSLT{year}.{name}.de-en.{language}.xml"] = text
    return archive(path, members)


def wmt14(folder: Path, training: Pairs, held_out: Pairs) -> Path:
    folder.mkdir()
    for name, pairs in (("train", training), ("newstest2013", held_out), ("newstest2014", held_out)):
        for side, language in enumerate(("en", "de")):
            (folder / f"{name}.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs))
    return folder


def glue(path: Path, task: str, dev: str, columns: tuple[str, str, str], training: int, held_out: int) -> Path:
    """Pairs of sentences that are the same, or not. ``columns``: the two sentences' names and the label's."""
    with zipfile.ZipFile(path, "w") as made:
        for split, count in (("train", training), (dev, held_out), ("test", 1)):
            rows = "".join(f'{i}\ta "b {i}\t{"a" if i % 2 else "c"} "b {i}\t{i % 2}\n' for i in range(count))
            made.writestr(f"{task}/{split}.tsv", "\t".join(("index", *columns)) + f"\n{rows}")
    return path


def roberta(folder: Path, width: int) -> Path:
    """One layer of random weights, under the names of the published checkpoint, which fairseq brings up to date."""
    from fairseq.data import Dictionary
    from fairseq.models.roberta.model import RobertaModel

    folder.mkdir()
    letters = 'abc"0123456789\u0120'  # GPT-2 writes a space as the last
    (folder / "encoder.json").write_text(json.dumps({letter: n for n, letter in enumerate(letters)}))
    (folder / "vocab.bpe").write_text("#version: 0.2\n\n")
    (folder / "dict.txt").write_text("".join(f"{n} 1\n" for n in range(len(letters))))
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    dictionary.add_symbol("<mask>")
    sizes = {"encoder_layers": 1, "encoder_embed_dim": width, "encoder_ffn_embed_dim": width}
    options = Namespace(arch="roberta", task="masked_lm", max_positions=512, encoder_attention_heads=2, **sizes)
    model = RobertaModel.build_model(options, SimpleNamespace(source_dictionary=dictionary))
    names = {name: name.replace("encoder.", "decoder.", 1) for name in model.state_dict()}
    old = {name: new.replace("layernorm_embedding", "emb_layer_norm") for name, new in names.items()}
    ended = {"criterion_name": "MaskedLmLoss", "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}
    state = {
        "args": options,
        "model": {old[name]: tensor for name, tensor in model.state_dict().items()},
        "optimizer_history": [{**ended, "num_updates": 500_000}],
        "extra_state": {"train_iterator": {"epoch": 1}},
        "last_optimizer_state": None,
    }
    torch.save(state, folder / "model.pt")
    return folder
