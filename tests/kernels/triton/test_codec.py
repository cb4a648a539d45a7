"""A launch past Triton's lookup runs the kernel that Triton would run: shown by its compiler, without a GPU."""

import os
import random
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from dsq.formats import BFP, FixedPoint, Layout, SignedNVInt
from dsq.kernels.backend import DTYPES

jit = pytest.importorskip("triton.runtime.jit", reason="the GPU backend needs triton, which is not installed")
compiled = pytest.importorskip("analysis.gpu.compiled")
codec = pytest.importorskip("dsq.kernels.triton.codec")
Launch = pytest.importorskip("dsq.kernels.triton.launch").Launch
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET is set: Triton compiles nothing", allow_module_level=True)

FORMATS = BFP(4), BFP(5, 32), BFP(16), SignedNVInt(3), SignedNVInt(4), FixedPoint(4), FixedPoint(5, 3)
SHAPES = (1, 1), (1, 16), (16, 1), (16, 16), (17, 48), (65, 128)
#: what Triton may treat apart: one, multiples of 16, more than 32 bits, a tensor
SEEDS = 0, 1, 17, 2**40, torch.zeros(1, dtype=torch.int64)


def placed(rng, shape, dtype):
    """A tensor that is aligned to 16 bytes, or now and then not."""
    x = torch.empty(torch.Size(shape).numel() + 32, dtype=dtype)
    first = -x.data_ptr() % 16 // x.itemsize + rng.choice((0, 0, 0, 0, 0, 0, 0, 1, 2, 4))
    return x[first : first + torch.Size(shape).numel()].view(shape)


def launches(rng):
    """Calls that differ in where tensors lie, in seeds and in limits."""
    shape, dim, fmt, fmt_2, rounds_to_nearest = map(rng.choice, (SHAPES, (0, 1), FORMATS, FORMATS, (True, False)))
    dtype, out, other = rng.choices(DTYPES, k=3)
    layout, count = Layout.of(shape, dim), torch.Size(shape).numel()
    beside, draws = rng.choice(SHAPES), None if rounds_to_nearest else 7
    both = codec.Wanted(fmt, layout, None, draws), codec.Wanted(fmt_2, Layout.of(shape, 1 - dim), out, draws)
    one = codec.Wanted(fmt, Layout.of(beside, dim), other, draws)
    encoder = codec.encoder((dtype, both[: rng.choice((1, 2))]), (other, (one,)))
    for _ in range(4):
        x, seed = placed(rng, shape, dtype), None if rounds_to_nearest else rng.choice(SEEDS)
        yield partial(encoder, seed, x, placed(rng, beside, other))
        codes, scales = (placed(rng, it, torch.uint8) for it in (layout.code_shape(fmt.bits), fmt.scale_shape(layout)))
        yield partial(codec.unpack, codes, scales, fmt, layout, out)
        x, bits = x.view(-1), placed(rng, ((count + 7) // 8,), torch.uint8)
        yield partial(codec.pack_mask, rng.choice((x, x > 0)), *rng.choice(((0.0, 1.0), (1, 16))), True)
        yield partial(codec.unpack_mask, bits, count, dtype)
        yield partial(codec.apply_mask, bits, x)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_launches_that_are_remembered_as_one_are_one_compiled_kernel_to_triton(target):
    found, met = defaultdict(set), defaultdict(int)
    of_triton = jit.compute_cache_key
    asked = [None]

    class Asked(dict):
        """In the place of what a launch has compiled: it has nothing, and remembers what it was asked for."""

        def get(self, key):
            asked[0] = key and (id(self), key)

    def made(self, *args, **options):
        init(self, *args, **options)
        self._compiled = Asked()

    def note(*args):
        key = of_triton(*args)
        found[asked[0]].add(key)
        met[asked[0]] += 1
        return key

    init = Launch.__init__
    rng = random.Random(0)
    for kept in (codec.encoder, codec._decoder, codec._of_mask):
        kept.cache_clear()
    with (
        patch.object(Launch, "__init__", made),
        patch.object(jit, "compute_cache_key", note),
        patch.object(jit.JITFunction, "_do_compile", lambda *args, **named: None),
        patch.object(compiled.driver, "_active", compiled._absent_device(target)),
    ):
        for _ in range(100):
            for call in launches(rng):
                call()
    found.pop(None)  # what is not aligned is Triton's to look up
    assert sum(times > 1 for times in met.values()) > 300
    assert [key for key, keys in found.items() if len(keys) > 1] == []
    for kept in (codec.encoder, codec._decoder, codec._of_mask):
        kept.cache_clear()


def comparable(given):
    """What a launcher was given: of a tensor its address, of Triton's note of the launch what it says."""
    return given.data_ptr() if isinstance(given, torch.Tensor) else getattr(given, "data", given)


def test_a_second_launch_gives_the_gpu_what_triton_gave_it(monkeypatch):
    given = []
    device = compiled._absent_device("sm_90")
    device.launcher_cls = lambda *_: lambda *args: given.append(list(map(comparable, args)))
    device.utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 1 << 20},
        load_binary=lambda name, *_: (name, name, 32, 0, 1024),
    )
    monkeypatch.setattr(compiled.driver, "_active", device)
    x, fmt, layout = torch.empty(64, 96), SignedNVInt(4), Layout.of((64, 96), 0)
    codes, scales = (torch.empty(shape, dtype=torch.uint8) for shape in (layout.code_shape(4), fmt.scale_shape(layout)))
    tensors = (x, codes), (codes, scales, x)
    mask = codec._of_mask(codec.kernels.pack_mask, x.numel(), x.dtype, FLAGS=False, NAN_IS_OPEN=True)
    decoder, numbers = codec._decoder(fmt, layout, 0, x.dtype)
    for _ in range(2):
        mask(tensors[0], x.numel(), 0.0, 1.0)
        decoder(tensors[1], *numbers)
    assert len(given) == 4
    assert given[:2] == given[2:]
