"""Each test compiles afresh."""

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    counters.clear()
