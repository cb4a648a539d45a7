"""Fixtures of several folders."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch._dynamo.utils import counters


@pytest.fixture
def one_process() -> Iterator[None]:
    """A group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def fresh_compiler() -> None:
    """Nothing was compiled or counted before."""
    torch.compiler.reset()
    counters.clear()
