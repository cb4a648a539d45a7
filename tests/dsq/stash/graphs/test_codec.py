"""The codes of compiled graphs have the bits of the reference's."""

import pytest
import torch

from dsq.formats import BFP
from dsq.kernels.dispatch import layout_of
from dsq.kernels.reference.backend import REFERENCE
from dsq.stash.graphs import codec
from dsq.stash.graphs.codec import RowLayout
from tests.dsq.stash.graphs.divided import X


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("fused", [True, False], ids=["plain operations", "operators"])
def test_codes_stand_for_the_references_values(bits, dtype, fused):
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(64, 48, generator=generator) * torch.exp(3 * torch.randn(64, 1, generator=generator))
    x[0], x[1, 3], x[2, 5], x[3, 40] = 0, float("inf"), float("nan"), -float("inf")
    x = x.to(dtype).view(4, 16, 48).transpose(0, 1)
    layout = RowLayout.of(x, 16)
    saved = codec.encode(x, bits, layout, fused)
    decoded = codec.decode(*saved, bits=bits, layout=layout, dtype=dtype, fused=fused)
    flat = x.transpose(0, 1).flatten()
    rows, fmt = layout_of(flat.shape, 0), BFP(bits, 16)
    expected = REFERENCE.unpack(*REFERENCE.pack(flat, fmt, rows, None), fmt, rows, dtype)
    assert torch.equal(decoded.transpose(0, 1).flatten().nan_to_num(7.0), expected.flatten().nan_to_num(7.0))
    assert decoded.stride() == x.stride()
    assert sum(part.nbytes for part in saved) * 8 == x.numel() * (bits + 0.5)


@pytest.mark.parametrize("fused", [True, False])
def test_a_mask_is_a_bit_a_value(fused):
    mask = X > 0.3
    layout = RowLayout.of(mask, 8)
    (words,) = codec.encode_mask(mask, layout, fused)
    assert words.nbytes == mask.numel() / 8
    assert torch.equal(codec.decode_mask(words, layout=layout, fused=fused), mask)


@pytest.mark.parametrize(
    ("x", "columns"),
    [
        (X, (64,)),
        (X.transpose(0, 2), (64,)),
        (torch.zeros(5, 4, 4), (4, 4)),
        (X[..., :32], None),
        (X[:, :1, 1:5], None),
    ],
)
def test_rows_are_neighbors_in_memory(x, columns):
    layout = RowLayout.of(x, 16)
    assert (layout and layout.columns) == columns
