"""The texts that dsq-preprocess is given: parallel, UTF-8 and not empty."""

import argparse
from pathlib import Path

from fairseq_plugin.flags import InputError


def check_texts(options: argparse.Namespace) -> None:
    """Raise InputError for languages that are missing, and for texts that are, or that do not go line by line."""
    if not options.only_source:
        for language in ("source", "target"):
            if not getattr(options, f"{language}_lang"):
                otherwise = ", or --only-source" if language == "target" else ""
                raise InputError(f"--{language}-lang is missing: give the suffix of the {language}'s texts{otherwise}")
        if options.source_lang == options.target_lang:
            raise InputError(f"--target-lang must be another than --source-lang, got {options.target_lang} for both")
    if not options.trainpref and not options.srcdict:
        raise InputError("--trainpref is missing: give PREFIX of texts PREFIX.LANGUAGE")
    languages = [options.source_lang] if options.only_source else [options.source_lang, options.target_lang]
    languages += [options.align_suffix] if options.align_suffix else []
    for name in ("trainpref", "validpref", "testpref"):
        for prefix in filter(None, (getattr(options, name) or "").split(",")):
            _check_parallel(f"--{name}", [f"{prefix}.{language}" if language else prefix for language in languages])


def _check_parallel(flag: str, paths: list[str]) -> None:
    counts = [_lines(flag, Path(path)) for path in paths]
    if len(set(counts)) > 1:
        raise InputError(
            f"{flag}: {paths[0]} has {counts[0]:,} lines and {paths[1]} has {counts[1]:,}: "
            "give texts that go line by line"
        )


def _lines(flag: str, path: Path) -> int:
    if not path.is_file():
        raise InputError(f"{flag}: {path} does not exist: give PREFIX of texts PREFIX.LANGUAGE")
    try:
        with path.open(encoding="utf-8") as text:
            count = sum(1 for _ in text)
    except UnicodeDecodeError as error:
        raise InputError(f"{flag}: {path} is no UTF-8 ({error.reason} at byte {error.start}): convert it") from None
    if not count:
        raise InputError(f"{flag}: {path} is empty: give a text")
    return count
