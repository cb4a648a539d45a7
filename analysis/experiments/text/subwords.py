"""One BPE vocabulary for both languages, by the sentencepiece library."""

import io
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from analysis.experiments.text.parallel_text import ParallelText


def train_bpe(sentences: Iterable[str], size: int) -> sentencepiece.SentencePieceProcessor:
    """Learn `size` subwords.

    Raises ValueError for a size that this text cannot give.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            character_coverage=1.0,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        why = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"--vocab {size}: sentencepiece cannot learn this number of subwords of this text ({why})"
        ) from None
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_pieces(
    text: ParallelText, bpe: sentencepiece.SentencePieceProcessor, prefix: Path, languages: tuple[str, str]
) -> None:
    """Write prefix.SOURCE and prefix.TARGET: a sentence a line, its pieces between spaces."""
    for side, language in zip((text.source, text.target), languages, strict=True):
        lines = "".join(" ".join(pieces) + "\n" for pieces in bpe.encode(side, out_type=str))
        Path(f"{prefix}.{language}").write_text(lines, encoding="utf-8")
