"""The repeated blocks of a model, and which of its modules stay in floating point at both ends."""

import math
import warnings
from collections import Counter

from torch import nn


def parse_ends(text: str) -> tuple[float, float]:
    """Return how many blocks stay in floating point at the beginning and at the end: numbers, or shares below 1.

    Raises ValueError for what is not two of them, as in "2,8" or "0.03,0.13".
    """
    try:
        first, last = (float(number) for number in text.split(","))
    except (ValueError, AttributeError):
        first = last = math.nan
    if not all(number >= 0 and (number < 1 or number % 1 == 0) and math.isfinite(number) for number in (first, last)):
        raise ValueError(f'plain_ends must be two numbers of blocks, or shares of them, as "2,8", got {text!r}')
    return first, last


def block_lists(model: nn.Module) -> list[list[nn.Module]]:
    """Return the blocks of ``model``, outermost ones: of a list or a sequence of modules those that have modules inside
    and a class that repeats there."""
    lists: list[list[nn.Module]] = []
    seen: set[nn.Module] = set()
    for module in model.modules():
        if module in seen or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        number = Counter(map(type, module))
        if blocks := [block for block in module if number[type(block)] > 1 and any(block.children())]:
            lists.append(blocks)
            seen |= {inner for block in blocks for inner in block.modules()}
    return lists


def plain_at_ends(model: nn.Module, ends: str) -> set[nn.Module]:
    """Return the modules of the first and the last blocks of each list, and those outside of blocks, as a head.

    Empty for a model without blocks, with a warning.
    """
    lists, (first, last) = block_lists(model), parse_ends(ends)
    if not lists and any(model.children()):
        cure = "all layers are converted; exclude names those that stay, such as a head"
        warnings.warn(f"plain_ends={ends!r} finds no blocks, a list of modules of one class: {cure}", stacklevel=5)
    inner: set[nn.Module] = set()
    for blocks in lists:
        begin, end = (math.floor(n * len(blocks) + 0.5) if n < 1 else int(n) for n in (first, last))
        inner |= {module for block in blocks[begin : len(blocks) - end] for module in block.modules()}
    return set(model.modules()) - inner if lists else set()
