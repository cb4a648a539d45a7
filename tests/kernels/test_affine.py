"""Codes between a low and a step of each group: what is refused. (That backends agree: the conformance suite.)"""

import pytest
import torch

from dsq.kernels.backend import Groups, Running
from dsq.kernels.dispatch import affine_pack


def test_groups_and_ranges_that_do_not_fit_the_values_are_refused():
    x = torch.randn(4, 32)
    for bits, groups in ((9, Groups(16, 8)), (0, Groups(16, 8)), (4, Groups(0, 8)), (4, Groups(16, 0))):
        with pytest.raises(ValueError, match="bits must be 1 to 8, and runs and groups at least 1, got"):
            affine_pack(x, bits, groups)
    with pytest.raises(ValueError, match="each of the 7 groups must be one run of 16 of 128 values"):
        affine_pack(x, 4, Groups(16, 7))
    for ranges in (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8, 2).t(), torch.zeros(2, 8, device="meta")):
        with pytest.raises(ValueError, match=r"running ranges must be contiguous torch\.float32 on cpu, got"):
            affine_pack(x, 4, Groups(16, 8), Running(ranges, 0.9))
    with pytest.raises(ValueError, match=r"ranges must have the shape \(2, 8\), got \(2, 7\)"):
        affine_pack(x, 4, Groups(16, 8), Running(torch.zeros(2, 7), 0.9))
