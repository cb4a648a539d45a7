"""Saved-tensor hooks that return no packed tensor cause one clear error, never a read out of bounds."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import dsq
from dsq.formats import BFP
from dsq.kernels import dispatch
from dsq.kernels.backend import AffineCodes, Groups

CHANGES = {
    "no row": lambda codes: codes[:0],
    "one row": lambda codes: codes[:1],
    "a byte less": lambda codes: codes[..., :-1],
    "wrong dtype": lambda codes: codes.float(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("level", ["[4,4,4,16]", "[8,8,8,16]", "[-,4,-,-]"])
def test_hooks_that_return_other_codes_are_refused(change, level):
    layer = dsq.Linear(64, 32, precision=level)
    x = torch.randn(48, 64, requires_grad=True)

    def unpack(saved):
        return CHANGES[change](saved) if saved.dtype == torch.uint8 else saved

    with saved_tensors_hooks(lambda t: t.detach(), unpack):
        y = layer(x)
    with pytest.raises(ValueError, match="codes and scales must be"):
        y.sum().backward()


def _emptied(x):
    x.untyped_storage().resize_(0)
    return x


def _halved(x):
    x.untyped_storage().resize_(x.nbytes // 2)
    return x


@pytest.mark.parametrize("without_memory", [_emptied, _halved, lambda x: torch._efficientzerotensor(x.shape)])
def test_a_tensor_without_memory_is_refused_and_not_read(without_memory):
    x, fmt, groups = without_memory(torch.randn(32, 32)), BFP(4), Groups(16, 64)
    codes, scales = dispatch.pack(torch.randn(32, 32), fmt, -1)
    mask = dispatch.pack_mask(torch.randn(1024), 0.0, 1.0, True)
    affine = dispatch.affine_pack(torch.randn(1024), 4, groups)
    calls = [
        lambda: dispatch.quantize(x, fmt, -1),
        lambda: dispatch.pack(x, fmt, 0),
        lambda: dispatch.pack_mask(x, 0.0, 1.0, True),
        lambda: dispatch.apply_mask(mask, x),
        lambda: dispatch.relu(x),
        lambda: dispatch.affine_pack(x, 4, groups),
        lambda: dsq.functional.linear(x, torch.randn(8, 32), None, "[4,4,4,16]"),
        lambda: dsq.functional.linear(torch.randn(4, 32), x, None, "[4,4,4,16]"),
        lambda: dsq.functional.linear(torch.randn(4, 16), torch.randn(1024, 16), x.view(-1), "[4,4,4,16]"),
    ]
    if x._is_zerotensor():  # PyTorch passes zeros to the operator
        assert not torch.ops.dsq.pack(x, str(fmt), 0, None)[0].any()
    else:
        emptied = AffineCodes(without_memory(affine.codes), affine.ranges)
        calls += [
            lambda: torch.ops.dsq.pack(x, str(fmt), 0, None),
            lambda: dispatch.unpack(without_memory(codes), scales, fmt, (32, 32), -1, torch.float32),
            lambda: dispatch.unpack_mask(without_memory(mask), 1024, torch.float32),
            lambda: dispatch.affine_unpack(emptied, 4, groups, 1024, torch.float32),
        ]
    for number, call in enumerate(calls):
        with pytest.raises(ValueError, match="has no memory of its size on the CPU: was its storage resized"):
            pytest.fail(f"call {number} gave {call()}")


def test_a_layer_whose_memory_was_freed_before_the_backward_is_refused():
    for freed in ("weight", "stash", "gradient"):
        layer, x = dsq.Linear(64, 64, precision="[4,4,4,16]"), torch.randn(48, 64, requires_grad=True)
        saved: list[torch.Tensor] = []

        def keep(tensor, saved=saved):
            saved.append(tensor)
            return tensor.detach()

        with saved_tensors_hooks(keep, lambda t: t):
            y = layer(x)
        dy = torch.randn_like(y)
        tensors = {"weight": [layer.weight], "stash": [t for t in saved if t.dtype == torch.uint8], "gradient": [dy]}
        for tensor in tensors[freed]:
            _emptied(tensor.detach())
        # the layer itself checks its weight, the kernels all other tensors
        with pytest.raises((ValueError, RuntimeError), match=r"has no memory of its size|freed since the forward"):
            y.backward(dy)
