"""A launch past Triton's lookup runs the kernel that Triton would run: shown by its compiler, without a GPU."""

import os
import random
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from dsq.formats import BFP, FixedPoint, Layout, SignedBFP, SignedNVInt
from dsq.kernels.backend import DTYPES

jit = pytest.importorskip("triton.runtime.jit", reason="the GPU backend needs triton, which is not installed")
compiled = pytest.importorskip("analysis.gpu.compiled")
codec = pytest.importorskip("dsq.kernels.triton.codec")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET is set: Triton compiles nothing", allow_module_level=True)

FORMATS = BFP(4), BFP(5, 32), BFP(16), SignedBFP(3), SignedNVInt(4), FixedPoint(4), FixedPoint(5, 3)
SHAPES = (1, 1), (1, 16), (16, 1), (16, 16), (17, 48), (65, 128)
#: what Triton may treat apart: one, multiples of 16, more than 32 bits, a tensor
SEEDS = 0, 1, 17, 2**40, torch.zeros(1, dtype=torch.int64)


def placed(rng, shape, dtype):
    """A tensor that is aligned to 16 bytes, or often not."""
    x = torch.empty(torch.Size(shape).numel() + 32, dtype=dtype)
    first = -x.data_ptr() % 16 // x.itemsize + rng.choice((0, 0, 1, 2, 4))
    return x[first : first + torch.Size(shape).numel()].view(shape)


def launches(rng):
    """Calls that differ in where tensors lie, in seeds, in limits, and in what is rounded beside them."""
    shape, dim, fmt, fmt_2, rounds_to_nearest = map(rng.choice, (SHAPES, (0, 1), FORMATS, FORMATS, (True, False)))
    dtype, out, other = rng.choices(DTYPES, k=3)
    layout, count = Layout.of(shape, dim), torch.Size(shape).numel()
    for _ in range(4):
        seed = None if rounds_to_nearest else rng.choice(SEEDS)
        x, beside = placed(rng, shape, dtype), rng.choice(SHAPES)
        both = [codec.Wanted(fmt, layout, seed, None), codec.Wanted(fmt_2, Layout.of(shape, 1 - dim), seed, out)]
        one = codec.Wanted(fmt, Layout.of(beside, dim), seed, other)
        yield partial(codec.encode, (x, both[: rng.choice((1, 2))]), (placed(rng, beside, other), [one]))
        codes, scales = (placed(rng, it, torch.uint8) for it in (layout.code_shape(fmt.bits), fmt.scale_shape(layout)))
        yield partial(codec.unpack, codes, scales, fmt, layout, out)
        x, bits = x.view(-1), placed(rng, ((count + 7) // 8,), torch.uint8)
        yield partial(codec.pack_mask, rng.choice((x, x > 0)), *rng.choice(((0.0, 1.0), (1, 16))), True)
        yield partial(codec.unpack_mask, bits, count, dtype)
        yield partial(codec.apply_mask, bits, x)


class Asked(dict):
    """In the place of the compiled kernels: it has none, and remembers what it was asked for."""

    def get(self, key):
        self.last = key


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_launches_of_one_key_are_one_compiled_kernel_to_triton(target):
    asked, found, met = Asked(), defaultdict(set), defaultdict(int)
    of_triton = jit.compute_cache_key

    def note(*args):
        key = of_triton(*args)
        found[asked.last].add(key)
        met[asked.last] += 1
        return key

    rng = random.Random(0)
    with (
        patch.object(codec, "_compiled", asked),
        patch.object(jit, "compute_cache_key", note),
        patch.object(jit.JITFunction, "_do_compile", lambda *args, **named: None),
        patch.object(compiled.driver, "_active", compiled._absent_device(target)),
    ):
        for _ in range(100):
            for call in launches(rng):
                call()
    assert sum(times > 1 for times in met.values()) > 300
    assert [key for key, keys in found.items() if len(keys) > 1] == []


def comparable(given):
    """What a launcher was given: of a tensor its shape, of Triton's note of the launch what it says."""
    return given.shape if isinstance(given, torch.Tensor) else getattr(given, "data", given)


def test_a_second_launch_gives_the_gpu_what_triton_gave_it(monkeypatch):
    given = []
    device = compiled._absent_device("sm_90")
    device.launcher_cls = lambda *_: lambda *args: given.append(list(map(comparable, args)))
    device.utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 1 << 20},
        load_binary=lambda name, *_: (name, name, 32, 0, 1024),
    )
    monkeypatch.setattr(compiled.driver, "_active", device)
    monkeypatch.setattr(codec, "_compiled", {})
    x, layout = torch.empty(64, 96), Layout.of((64, 96), 0)
    calls = partial(codec.pack, x, SignedNVInt(4), layout, None), partial(codec.pack_mask, x.view(-1), 0.0, 1.0, True)
    for call in calls * 2:
        call()
    assert len(given) == 6
    assert given[:3] == given[3:]
    assert len(codec._compiled) == 3
