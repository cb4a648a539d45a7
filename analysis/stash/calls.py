"""How many Python calls in files of dsq a warm step makes: python -m analysis.stash.calls

Linear, LayerNorm, GELU, Linear of width 128, the third step, forward and backward, counted by sys.setprofile.
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

SETUPS = {
    "plain": ("", {}),
    "linears": ("[8,4,4,8]", {"stash": "linears"}),
    "whole": ("[8,4,4,8]", {"stash": "all"}),
}


def calls(levels: str, options: dict[str, Any]) -> Counter[str]:
    """Calls of a step, by file."""
    model = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128))
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
    for name, (levels, options) in SETUPS.items():
        found = calls(levels, options)
        rows.append({"setup": name, "calls": found.total(), "files": len(found)})
    print(table(rows, {"setup": "", "calls": "d", "files": "d"}))


if __name__ == "__main__":
    main()
