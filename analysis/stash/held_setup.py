"""Bytes claimed and held for one setup of analysis.stash.compare, by its number; run under the counting malloc."""

import json
import sys

import torch

from analysis.stash.allocator.held import step_bytes
from analysis.stash.setups import CASES, SETUPS, attach, loss_that_keeps_nothing
from dsq import stash


def main(number: int) -> None:
    """Print them as JSON."""
    setup = SETUPS[number]
    case = CASES[setup.case]
    torch.manual_seed(0)
    model, (x, _) = case.model(), case.batch()
    case.prepare(model, x)
    attach(model, setup.policies)
    step = step_bytes(loss_that_keeps_nothing(model, x))
    print(json.dumps([stash.measure(lambda: model(x)).nbytes, step.stash, step.peak, step.left]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
