"""The one reader of a setup's name: what is put on a model that is measured.

A name has parts with " + " between them, in the order of applying. A part is

    [4,4,4,8] WORDS     dsq.convert; words: "whole" (every other saved tensor packed too), a format, "stochastic",
                        "float32" (its products in float32), "tied" (also a tied output projection), "headless" (the
                        layer called head stays plain)
    bfp 4, snvint 4     policy bfp, that format
    gact 4              also "gact 4 uniform", "gact 4 CB1", with uniform bits
    mesa                also "selective", "checkpoint SEGMENTS", "wtacrs 0.3"
    around bfp 4        a GPT's blocks are called with a packed checkpoint of that format; "around checkpoint": plain
    bf16                the model itself is cast
    fp32, plain, autocast, bf16 autocast, fused    nothing: the caller's contexts
"""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

import dsq
from dsq.formats import format_class

_CONFIG: dict[str, dict[str, Any]] = {
    "whole": {"stash": "all"},
    "stochastic": {"rounding": "stochastic"},
    "float32": {"units": "float32"},
    "tied": {"tied": True},
    "headless": {"exclude": "head"},
    **{name: {"format": name} for name in ("bfp", "sbfp", "snvint", "fixed")},
}
_NOTHING = ("plain", "fp32", "autocast", "bf16 autocast", "fused")


def attach(model: nn.Module, name: str) -> list[Any]:
    """Put the setup of this name on a model, in place. Returns the controllers of its policies."""
    controllers: list[Any] = []
    for part in name.split(" + "):
        first, *words = part.split()
        if first.startswith("["):
            options = {key: value for word in words for key, value in _CONFIG[word].items()}
            dsq.convert(model, dsq.DSQConfig(levels=first, **options))  # type: ignore[arg-type]
        elif first == "around":
            around: Any = partial(checkpoint, use_reentrant=False)
            if words != ["checkpoint"]:
                around = partial(dsq.stash.packed_checkpoint, fmt=format_class(words[0])(int(words[1])))
            model.around = around
        elif part == "bf16":
            model.bfloat16()
        elif part not in _NOTHING:
            policy, options = _policy(first, words)
            controllers.append(dsq.stash.apply(model, policy, **options))
    return controllers


def _policy(first: str, words: list[str]) -> tuple[str, dict[str, Any]]:
    if first in ("bfp", "snvint"):
        return "bfp", {"bits": int(words[0]), "format": first}
    if first == "wtacrs":
        return "wtacrs", {"ratio": float(words[0])}
    if first == "checkpoint" and words:
        return first, {"segments": words[0]}
    if first == "gact" and words:
        options: dict[str, Any] = {"level": "CB1"} if "CB1" in words else {}
        return "gact", {"bits": int(words[0])} | options | ({"adapt_interval": None} if words[1:] else {})
    return first, {}
