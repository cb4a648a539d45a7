"""A launch that skips Triton's lookup runs the kernel that Triton would run: shown by its compiler, without a GPU."""

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
#: values that Triton may compile differently: one, multiples of 16, more than 32 bits, a tensor
SEEDS = 0, 1, 17, 2**40, torch.zeros(1, dtype=torch.int64)


def misaligned(rng, shape, dtype):
    """A tensor that is aligned to 16 bytes, or now and then not."""
    numel = torch.Size(shape).numel()
    x = torch.empty(numel + 32, dtype=dtype)
    start = -x.data_ptr() % 16 // x.itemsize + rng.choice((0, 0, 0, 0, 0, 0, 0, 1, 2, 4))
    return x[start : start + numel].view(shape)


def launches(rng):
    """Calls that differ in the addresses of tensors, in seeds and in limits."""
    shape, dim, fmt, fmt_2, rounds_to_nearest = map(rng.choice, (SHAPES, (0, 1), FORMATS, FORMATS, (True, False)))
    dtype, y_dtype, w_dtype = rng.choices(DTYPES, k=3)
    layout, layout_2 = Layout.of(shape, dim), Layout.of(shape, 1 - dim)
    count = torch.Size(shape).numel()
    w_shape = rng.choice(SHAPES)
    seed_offset = None if rounds_to_nearest else 7
    requests = codec.Request(fmt, layout, None, seed_offset), codec.Request(fmt_2, layout_2, y_dtype, seed_offset)
    w_request = codec.Request(fmt, Layout.of(w_shape, dim), w_dtype, seed_offset)
    encoder = codec.encoder((dtype, requests[: rng.choice((1, 2))]), (w_dtype, (w_request,)))
    for _ in range(4):
        x, seed = misaligned(rng, shape, dtype), None if rounds_to_nearest else rng.choice(SEEDS)
        yield partial(encoder, seed, x, misaligned(rng, w_shape, w_dtype))
        codes = misaligned(rng, layout.code_shape(fmt.bits), torch.uint8)
        scales = misaligned(rng, fmt.scale_shape(layout), torch.uint8)
        yield partial(codec.unpack, codes, scales, fmt, layout, y_dtype)
        x, bits = x.view(-1), misaligned(rng, ((count + 7) // 8,), torch.uint8)
        yield partial(codec.pack_mask, rng.choice((x, x > 0)), *rng.choice(((0.0, 1.0), (1, 16))), True)
        yield partial(codec.unpack_mask, bits, count, dtype)
        yield partial(codec.apply_mask, bits, x)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_launches_with_one_key_are_one_compiled_kernel_to_triton(target):
    triton_keys, counts = defaultdict(set), defaultdict(int)
    compute_cache_key = jit.compute_cache_key
    current_key = [None]

    class Lookups(dict):
        """Takes the place of the compiled kernels of a launch: it is empty, and notes the key that is looked up."""

        def get(self, key):
            current_key[0] = key and (id(self), key)

    def init(self, *args, **options):
        real_init(self, *args, **options)
        self._compiled = Lookups()

    def note(*args):
        triton_key = compute_cache_key(*args)
        triton_keys[current_key[0]].add(triton_key)
        counts[current_key[0]] += 1
        return triton_key

    real_init = Launch.__init__
    rng = random.Random(0)
    caches = codec.encoder, codec._decoder, codec._mask_launch
    for cache in caches:
        cache.cache_clear()
    with (
        patch.object(Launch, "__init__", init),
        patch.object(jit, "compute_cache_key", note),
        patch.object(jit.JITFunction, "_do_compile", lambda *args, **named: None),
        patch.object(compiled.driver, "_active", compiled._absent_device(target)),
    ):
        for _ in range(100):
            for call in launches(rng):
                call()
    triton_keys.pop(None)  # Triton looks up the launches with tensors that are not aligned
    assert sum(count > 1 for count in counts.values()) > 300
    assert [key for key, keys in triton_keys.items() if len(keys) > 1] == []
    for cache in caches:
        cache.cache_clear()


def comparable(argument):
    """The address of a tensor, the data of Triton's note of a launch, or the argument."""
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else getattr(argument, "data", argument)


def test_a_second_launch_gives_the_gpu_the_arguments_that_triton_gave_it(monkeypatch):
    launched = []
    device = compiled._absent_device("sm_90")
    device.launcher_cls = lambda *_: lambda *args: launched.append(list(map(comparable, args)))
    device.utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 1 << 20},
        load_binary=lambda name, *_: (name, name, 32, 0, 1024),
    )
    monkeypatch.setattr(compiled.driver, "_active", device)
    x, fmt, layout = torch.empty(64, 96), SignedNVInt(4), Layout.of((64, 96), 0)
    codes, scales = (torch.empty(shape, dtype=torch.uint8) for shape in (layout.code_shape(4), fmt.scale_shape(layout)))
    mask = codec._mask_launch(codec.kernels.pack_mask, x.numel(), x.dtype, FLAGS=False, NAN_IS_OPEN=True)
    decoder, sizes = codec._decoder(fmt, layout, 0, x.dtype)
    for _ in range(2):
        mask(x_pointer=x, bits_pointer=codes, count=x.numel(), low=0.0, high=1.0)
        decoder(codes_pointer=codes, scales_pointer=scales, y_pointer=x, **sizes)
    assert len(launched) == 4
    assert launched[:2] == launched[2:]
