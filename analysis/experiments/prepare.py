"""Turns the official files of a full-size corpus into what its recipe reads.

    python -m analysis.experiments.prepare iwslt17 path/to/de-en.tgz --out data/iwslt17

Nothing is downloaded: --help says where each corpus is to be had. A file's SHA-256 is checked where one was published,
the number of sentence pairs elsewhere; what was not read to its end leaves nothing behind.
"""

import hashlib
import html
import io
import re
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dsq.command.files import make_folder
from dsq.command.parser import OneLineParser, guarded

PROG = "python -m analysis.experiments.prepare"
LANGUAGES = ("de", "en")
#: a file to be written, and its lines
File = tuple[str, Iterable[str]]


@dataclass(frozen=True)
class Corpus:
    files: Callable[[Path], Iterator[File]]  #: what comes out of what a person gives
    where: str  #: a person gets that
    sha256: str = ""  #: of the archive, as huggingface/datasets records it
    lines: dict[str, int] = field(default_factory=dict)  #: that a file must have, where there is no checksum


def prepare(name: str, given: Path, out: Path) -> None:
    """Write the files of the corpus ``name`` to ``out``. Raises ValueError where ``given`` is not what it comes of."""
    corpus = CORPORA[name]
    if not given.exists():
        raise ValueError(f"{given}: there is no such file; {name} is made of {corpus.where}")
    if corpus.sha256:
        check_sha256(given, corpus.sha256, corpus.where)
    make_folder(out)
    written: dict[Path, Path] = {}
    try:
        for file, lines in corpus.files(given):
            path = out / file
            path.parent.mkdir(parents=True, exist_ok=True)
            written[path] = path.with_name(f"{path.name}.part")
            count = _write(written[path], lines)
            if count != corpus.lines.get(file, count):
                raise ValueError(f"{given}: gives {count} lines of {file}, expected {corpus.lines[file]}")
            print(f"{path}: {count} lines", flush=True)
        for path, part in written.items():
            part.replace(path)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{given}: is damaged, or not {corpus.where}") from error
    finally:
        for part in written.values():
            part.unlink(missing_ok=True)


def check_sha256(path: Path, expected: str, of: str) -> None:
    """Raise ValueError where the file is another than ``of``, whose SHA-256 is ``expected``."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(f"{path}: its SHA-256 is {found}, expected {expected}, that of {of}")


def _write(path: Path, lines: Iterable[str]) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(f"{line}\n")
            count += 1
    return count


def _iwslt14(archive: Path) -> Iterator[File]:
    """As fairseq's prepare-iwslt14.sh, but for tokenising: every 23rd pair of the training text validates; pairs of
    more than 175 words, or of a side half again as long as the other, go (words, where the script counts tokens)."""
    with tarfile.open(archive) as tar:
        titles = re.compile(r"</?(title|description)>")
        dropped = re.compile(r"<(url|talkid|keywords)>")
        sides = [
            [titles.sub("", line).strip() for line in _lines(tar, rf"train\.tags\.de-en\.{language}", archive)
             if not dropped.search(line)]
            for language in LANGUAGES
        ]  # fmt: skip
        pairs = [pair for pair in zip(*sides, strict=True) if _alike(*map(str.split, pair))]
        tests = [
            _segments(tar, archive, language, r"dev2010|tst2010|tst2011|tst2012|dev2012") for language in LANGUAGES
        ]
    validating = pairs[22::23]
    training = [pair for number, pair in enumerate(pairs, start=1) if number % 23]
    for side, language in enumerate(LANGUAGES):
        yield f"train.{language}", (pair[side] for pair in training)
        yield f"valid.{language}", (pair[side] for pair in validating)
        yield f"test.{language}", (line.replace("’", "'") for line in tests[side])


def _alike(a: list[str], b: list[str]) -> bool:
    shorter, longer = sorted((len(a), len(b)))
    return shorter > 0 and longer <= min(175, 1.5 * shorter)


def _iwslt17(archive: Path) -> Iterator[File]:
    """Training text without what stands in tags; dev2010 to tst2014 validate, tst2015 tests."""
    with tarfile.open(archive) as tar:
        for language in LANGUAGES:
            training = _lines(tar, rf"train\.tags\.de-en\.{language}", archive)
            yield f"train.{language}", (line.strip() for line in training if not line.startswith("<"))
            yield f"valid.{language}", _segments(tar, archive, language, r"dev2010|tst201[0-4]")
            yield f"test.{language}", _segments(tar, archive, language, r"tst2015")


def _segments(tar: tarfile.TarFile, archive: Path, language: str, sets: str) -> list[str]:
    """The sentences of test sets, in the order of the files' names."""
    found = re.compile(r"<seg id=\"\d+\">\s*(.*?)\s*</seg>")
    lines = _lines(tar, rf"IWSLT\d\d\.TEDX?\.({sets})\.de-en\.{language}\.xml", archive)
    return [match[1] for line in lines if (match := found.search(line))]


def _lines(tar: tarfile.TarFile, pattern: str, archive: Path) -> list[str]:
    """The lines of all members whose name, folders aside, matches, in the order of their names."""
    names = sorted(name for name in tar.getnames() if re.fullmatch(pattern, name.rpartition("/")[2]))
    if not names:
        raise ValueError(f"{archive}: holds no file of the form {pattern}")
    return [line for name in names for line in _text(tar.extractfile(name))]


def _text(file: IO[bytes] | None) -> Iterator[str]:
    assert file is not None
    with io.TextIOWrapper(file, encoding="utf-8", newline="\n") as text:
        yield from (line.rstrip("\r\n") for line in text)


def _wmt14(folder: Path) -> Iterator[File]:
    """Its tokenised text with hyphens and escaped characters as they were."""
    for split, name in (("train", "train"), ("valid", "newstest2013"), ("test", "newstest2014")):
        for language in LANGUAGES:
            path = folder / f"{name}.{language}"
            if not path.is_file():
                raise ValueError(f"{path}: there is no such file")
            lines = (html.unescape(line.replace(" ##AT##-##AT## ", "-")) for line in _text(path.open("rb")))
            yield f"{split}.{language}", lines


def _glue(task: str, dev: str) -> Callable[[Path], Iterator[File]]:
    def files(archive: Path) -> Iterator[File]:
        with zipfile.ZipFile(archive) as unpacked:
            for name in (f"{task}/train.tsv", f"{task}/{dev}.tsv"):
                if name not in unpacked.namelist():
                    raise ValueError(f"{archive}: holds no {name}")
                yield name, _text(unpacked.open(name))

    return files


_WIT = "texts/de/en/de-en.tgz of wit3.fbk.eu"
_GLUE = "of dl.fbaipublicfiles.com/glue/data"
CORPORA = {
    "iwslt14": Corpus(_iwslt14, f"2014-01/{_WIT}", lines={"test.de": 6750, "test.en": 6750}),
    "iwslt17": Corpus(
        _iwslt17,
        f"2017-01-trnted/{_WIT}",
        "ebcd53c53c8df742437e3a0fb964772e78764c3f6d4e38df0b6a2f71abc3a8b4",
    ),
    "wmt14": Corpus(
        _wmt14,
        "a folder of train, newstest2013 and newstest2014, each .en and .de, of nlp.stanford.edu/projects/nmt",
        lines={
            f"{split}.{language}": count
            for split, count in (("train", 4_468_840), ("valid", 3000), ("test", 2737))
            for language in LANGUAGES
        },
    ),
    "mnli": Corpus(
        _glue("MNLI", "dev_matched"),
        f"MNLI.zip {_GLUE}",
        "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633",
    ),
    "qnli": Corpus(
        _glue("QNLI", "dev"),
        f"QNLIv2.zip {_GLUE}",
        "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(
        prog=PROG,
        description=__doc__,
        epilog="\n".join(f"{name}: {corpus.where}" for name, corpus in CORPORA.items()),
    )
    parser.add_argument("corpus", choices=CORPORA)
    parser.add_argument("given", type=Path, metavar="PATH", help="the archive, or the folder, as it was downloaded")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the recipe's data.path")
    given = parser.parse_args(arguments)
    return guarded(PROG, lambda: prepare(given.corpus, given.given, given.out))


if __name__ == "__main__":
    sys.exit(main())
