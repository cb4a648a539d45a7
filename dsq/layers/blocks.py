"""The repeated blocks of a model, and which of its modules stay in floating point at both ends."""

import math
import warnings
from collections import Counter
from collections.abc import Iterator

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


def block_lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the outermost blocks of a model, list by list: two or more members of one class of an nn.ModuleList or
    nn.Sequential, which are made of modules themselves."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        members = module._modules.values()  # a list's iterator may drop some, as fairseq's LayerDrop
        composite = [child for child in members if child is not None and next(child.children(), None) is not None]
        number = Counter(map(class_before_policies, composite))
        if blocks := [child for child in composite if number[class_before_policies(child)] > 1]:
            yield blocks
            return
    for child in module.children():
        yield from block_lists(child)


def class_before_policies(module: nn.Module) -> type:
    """Return the class of a module without the subclass that a stash policy made of it (dsq/stash/controller.py)."""
    return getattr(type(module), "_dsq_original", type(module))


def plain_at_ends(model: nn.Module, ends: str) -> set[nn.Module]:
    """Return the modules of the first and the last blocks of each list, and those outside of blocks, as a head.

    Empty for a model without blocks, with a warning.
    """
    lists, (first, last) = list(block_lists(model)), parse_ends(ends)
    if not lists and any(model.children()):
        cure = "all layers are converted; exclude names those that stay, such as a head"
        warnings.warn(f"plain_ends={ends!r} finds no blocks, a list of modules of one class: {cure}", stacklevel=5)
    inner: set[nn.Module] = set()
    for blocks in lists:
        begin, end = (math.floor(n * len(blocks) + 0.5) if n < 1 else int(n) for n in (first, last))
        inner |= {module for block in blocks[begin : len(blocks) - end] for module in block.modules()}
    return set(model.modules()) - inner if lists else set()
