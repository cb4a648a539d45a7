"""Saved-tensor hooks that give back what is no packed tensor: one clear error, never a read out of bounds."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import dsq

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
