"""torch.ops.dsq.* and saved-tensor hooks with what is no packed tensor: one clear error, never a read out of bounds."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import dsq

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
