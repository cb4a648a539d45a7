"""torch.ops.dsq.* and saved-tensor hooks with what is no packed tensor: one clear error, never a read out of bounds."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import dsq
from dsq.kernels.cpu.library import library

ops = torch.ops.dsq
CHANGES = {
    "no row": lambda codes: codes[:0],
    "one row": lambda codes: codes[:1],
    "wrong dtype": lambda codes: codes.float(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("bits", [4, 8])
def test_hooks_that_give_back_other_codes_are_refused(change, bits):
    layer = dsq.Linear(64, 32, precision=f"[{bits},{bits},{bits},16]")
    x = torch.randn(48, 64, requires_grad=True)

    def unpack(saved):
        return CHANGES[change](saved) if saved.dtype == torch.uint8 else saved

    with saved_tensors_hooks(lambda t: t.detach(), unpack):
        y = layer(x)
    with pytest.raises(ValueError, match="codes and scales must be"):
        y.sum().backward()


def integer_operands(rows=16, columns=24, depth=64, bits=4, box=16):
    """The arguments of gemm_integer."""
    power = library().c.POWER
    a, b = (
        dsq.pack(torch.randn(rows, depth), dsq.BFP(bits, box)),
        dsq.pack(torch.randn(columns, depth), dsq.BFP(bits, box)),
    )
    return [a.codes, a.scales, power, bits, 0, b.codes, b.scales, power, bits, 0, box, None, rows, columns, depth]


WRONG = {
    "rows": (12, 17),
    "columns": (13, 10**9),
    "depth": (14, 1 << 40),
    "negative": (12, -1),
    "box": (10, -3),
    "odd box": (10, 3),
    "other box": (10, 32),
    "bits": (3, 40),
    "across": (4, 7),
    "kind of scales": (2, 9),
    "codes": (0, torch.zeros(1, dtype=torch.uint8)),
    "codes of floats": (0, torch.zeros(16, 32)),
    "scales": (6, torch.zeros(1, dtype=torch.uint8)),
    "scales of another shape": (1, torch.zeros(2, 2, dtype=torch.uint8)),
    "bias": (11, torch.zeros(3)),
    "bias of integers": (11, torch.zeros(24, dtype=torch.int64)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_integer_products_of_what_does_not_fit(wrong):
    arguments, (place, value) = integer_operands(), WRONG[wrong]
    arguments[place] = value
    with pytest.raises(ValueError, match=r"must|no integer products"):
        ops.gemm_integer(*arguments)


def test_bfloat16_products_of_what_does_not_fit():
    a, b = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16)
    for wrong in ((a.view(torch.uint8), b, None), (a, a, None), (a[0], b, None), (a, b, torch.ones(3))):
        with pytest.raises(ValueError, match="must be"):
            ops.gemm_bf16(*wrong)


def test_unpack_of_what_does_not_fit():
    packed = dsq.pack(torch.randn(8, 32), dsq.BFP(4))
    name, shape, dtype = str(dsq.BFP(4)), [8, 32], torch.float32
    good = ops.unpack(packed.codes, packed.scales, name, shape, 1, dtype)
    assert torch.equal(good, packed.unpack())
    for codes, scales, size in (
        (packed.codes[:1], packed.scales, shape),
        (packed.codes, packed.scales[:0], shape),
        (packed.codes.float(), packed.scales, shape),
        (packed.codes, packed.scales.to(torch.int8), shape),
        (packed.codes, packed.scales, [8, 1 << 40]),
        (packed.codes, packed.scales, [-8, 32]),
    ):
        with pytest.raises(ValueError):
            ops.unpack(codes, scales, name, size, 1, dtype)
