"""From sentence trees to files of parallel text."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

from analysis.corpus import english, german, grammar

SPLITS = ("train", "valid", "test")


def as_text(words: list[str]) -> str:
    """Tokens to a written sentence: spaces, capital, and only the commas that separate something."""
    kept: list[str] = []
    for word in words:
        if word in (",", ".", "?") and kept and kept[-1] == ",":
            kept.pop()
        kept.append(word)
    text = " ".join(kept)
    for mark in ",.?":
        text = text.replace(f" {mark}", mark)
    return text[0].upper() + text[1:]


def pairs(seed: int) -> Iterator[tuple[str, str]]:
    """(German, English) without end: no German and no English sentence comes twice."""
    rng = Random(seed)
    seen_de: set[str] = set()
    seen_en: set[str] = set()
    while True:
        tree = grammar.sentence(rng)
        de, en = as_text(german.words(tree)), as_text(english.words(tree))
        if de in seen_de or en in seen_en:
            continue
        seen_de.add(de)
        seen_en.add(en)
        yield de, en


def write(out: Path, sentences: int, held_out: int, seed: int) -> None:
    """Write {train,valid,test}.{de,en} under out: `sentences` pairs in train, `held_out` in each of the others.

    Raises ValueError for sizes below 1, a negative seed, an out that is no directory, and before writing over a file.
    """
    for name, value, least in (("--sentences", sentences, 1), ("--held-out", held_out, 1), ("--seed", seed, 0)):
        if value < least:
            raise ValueError(f"{name} {value}: expected an integer of at least {least}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"OUT {out}: exists and is not a directory")
    paths = {(split, side): out / f"{split}.{side}" for split in SPLITS for side in ("de", "en")}
    taken = [path for path in paths.values() if path.exists()]
    if taken:
        raise ValueError(f"OUT {out}: {taken[0].name} is there already; give an empty or new directory")
    out.mkdir(parents=True, exist_ok=True)
    source = pairs(seed)
    # the held-out parts come first: they stay the same when the training part grows
    drawn = {split: [next(source) for _ in range(held_out)] for split in ("test", "valid")}
    drawn["train"] = [next(source) for _ in range(sentences)]
    for split in SPLITS:
        for column, side in enumerate(("de", "en")):
            lines = "".join(pair[column] + "\n" for pair in drawn[split])
            paths[split, side].write_text(lines, encoding="utf-8")
