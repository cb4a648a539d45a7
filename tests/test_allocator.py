"""The counting malloc against allocations of known size."""

import json

import pytest

from tests.allocator import compiler, run

_KNOWN = """
import ctypes, gc, json, torch
from tests.allocator import Count, step_bytes
from torch import nn

count, found = Count(), {}
libc = ctypes.CDLL(None)
libc.realloc.restype = libc.malloc.restype = ctypes.c_void_p

def realloc(size):
    block = libc.realloc(ctypes.c_void_p(libc.malloc(size // 2)), size)
    return type("Block", (), {"__del__": lambda self: libc.free(ctypes.c_void_p(block))})()

def sum_of_tensors(size):
    return torch.zeros(size // 4) + torch.ones(size // 4)

for make in (sum_of_tensors, bytes, realloc):
    for size in (100_000, 50_000_000):
        make(size)
        gc.collect()
        before = count.live()
        count.reset_peak()
        kept = make(size)
        grown, peak = count.live() - before, count.peak() - before
        del kept
        found[f"{make.__name__} {size}"] = [size, grown, count.live() - before, peak]
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 8))
x = torch.randn(512, 256)
found["step"] = vars(step_bytes(lambda: model(x).sum()))
print(json.dumps(found))
"""


@pytest.mark.skipif(compiler() is None, reason="no C compiler, or no glibc")
def test_known_allocations():
    found = json.loads(run("-c", _KNOWN))
    step = found.pop("step")
    for name, (size, grown, left, peak) in found.items():
        assert size <= grown <= size + 8192, name
        assert abs(left) < 8192, name  # what Python itself keeps for later
        assert peak >= (3 * size if name.startswith("sum") else grown), name
    kept = 512 * 1024 * 4 * 2  # what GELU was given and what it gave; the batch was there before
    assert kept <= step["stash"] <= kept + 32_768
    assert step["peak"] >= kept + 512 * 1024 * 4  # a gradient of GELU's result beside both
    assert abs(step["left"]) < 4096
