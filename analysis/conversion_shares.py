"""The share of GEMM FLOPs that dsq.convert quantizes in the models people train: python -m analysis.conversion_shares

Small configurations, so that it takes seconds; shares depend on the ratio of sequence to width, here 64 to 128.
"""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import dsq
from analysis.library_models import TRANSFORMERS, fairseq_transformer, transformer
from analysis.models import GPT, encoder
from dsq.command import OneLineParser, guarded, table

WIDTH, LAYERS, HEADS, VOCABULARY, TOKENS = 128, 2, 4, 512, 64
Made = tuple[nn.Module, dict[str, Any]]  #: a model and its inputs


def _values() -> torch.Tensor:
    return torch.randn(2, TOKENS, WIDTH)


MODELS: dict[str, Callable[[], Made]] = {
    **{name: partial(transformer, name, WIDTH, LAYERS, HEADS, VOCABULARY, (2, TOKENS)) for name in TRANSFORMERS},
    "nn.TransformerEncoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True), LAYERS),
        {"src": _values()},
    ),
    "nn.Transformer": lambda: (
        nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, 4 * WIDTH, batch_first=True),
        {"src": _values(), "tgt": _values()},
    ),
    "nn.MultiheadAttention": lambda: (
        nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        dict.fromkeys(("query", "key", "value"), _values()),
    ),
    "own attention": lambda: (encoder(LAYERS, WIDTH, HEADS, 4 * WIDTH, sdpa=True, causal=True), {"input": _values()}),
    "nanoGPT": lambda: (
        GPT(VOCABULARY, TOKENS, WIDTH, LAYERS, HEADS, dropout=0.0),
        {"tokens_BT": torch.randint(VOCABULARY, (2, TOKENS))},
    ),
    "fairseq": partial(fairseq_transformer, WIDTH, LAYERS, HEADS, VOCABULARY, (2, TOKENS)),
}


def shares(name: str, **options: Any) -> dict[str, Any]:
    """Forward and backward share of the model ``name``, and what was left; ``options`` of DSQConfig."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dsq.convert(model, dsq.DSQConfig(levels=dsq.parse_levels("[4,4,4,16]"), **options))
    report = dsq.report(model, **inputs)
    assert report.backward is not None
    skipped = sum(entry.parameters for entry in report.skipped)
    return {
        "model": name,
        "forward": report.forward.share,
        "backward": report.backward.share,
        "others": ", ".join(
            f"{op} {n / report.forward.total:.1%}" for op, n in report.forward.floating_point.items() if n
        ),
        "uncalled": len(report.uncalled),
        "skipped parameters": skipped,
        "stash": (report.stash_bytes or 0) / (report.unconverted_stash_bytes or 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.conversion_shares", description=__doc__)
    parser.add_argument("--attention", action="store_true", help="quantize attention's two products too")
    arguments = parser.parse_args(argv)

    def work() -> None:
        rows = [shares(name, attention=arguments.attention) for name in MODELS]
        columns = {"model": "", "forward": ".1%", "backward": ".1%", "others": "", "uncalled": ""}
        print(table(rows, columns | {"skipped parameters": "", "stash": ".0%"}, markdown=True))

    return guarded(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
