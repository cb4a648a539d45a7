"""How many Python calls in files of dsq a warm step makes: python -m analysis.stash.calls

The third step, forward and backward, of one Linear, and of Linear, LayerNorm, GELU, Linear, all of width 128, counted
by sys.setprofile.
"""

import sys
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import dsq
from dsq.command import table

SETUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("", {}),
    "linears": ("[8,4,4,8]", {"stash": "linears"}),
    "whole": ("[8,4,4,8]", {"stash": "all"}),
}


def one_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 128))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128))


def calls(model: nn.Module, levels: str, options: dict[str, Any]) -> Counter[str]:
    """Return the calls of a step, by file."""
    if levels:
        dsq.convert(model, dsq.DSQConfig(levels=levels, **options))
    x, found = torch.randn(8, 64, 128), Counter[str]()
    home = str(Path(dsq.__file__).resolve().parent)
    kernels = str((Path(dsq.__file__).resolve().parent / "kernels").resolve())

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and str(Path(frame.f_code.co_filename).resolve()).startswith((home, kernels)):
            found[frame.f_code.co_filename] += 1

    for step in range(3):
        if step == 2:
            sys.setprofile(note)
        model(x).sum().backward()
    sys.setprofile(None)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.autograd.set_multithreading_enabled(False)  # the backward in this thread, which the profile sees
    rows = []
    for made in (one_linear, block):
        for name, (levels, options) in SETUPS.items():
            found = calls(made(), levels, options)
            rows.append({"model": made.__name__, "setup": name, "calls": found.total(), "files": len(found)})
    print(table(rows, {"model": "", "setup": "", "calls": "d", "files": "d"}))


if __name__ == "__main__":
    main()
