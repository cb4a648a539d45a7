"""Which options a resumed run may change."""

from dataclasses import fields

import pytest

import dsq
from fairseq_plugin.flags import InputError
from fairseq_plugin.state import check_same

#: another value of each option
OTHER = {
    "levels": "[4,4,4,16] [16,4,4,16]",
    "format": "bfp",
    "block_size": 32,
    "fraction_bits": 4,
    "rounding": "stochastic",
    "gemm": "float32",
    "min_weight_bits": 8,
    "plain_ends": "1,1",
    "stash": "linears",
    "attention": True,
    "adapters": True,
    "exclude": "decoder",
    "tied": True,
    "patience": 7,
    "threshold": 0.1,
    "rise_at": 0.5,
    "eval_full_precision": True,
}
#: they say when the next level comes
FREE = {"patience", "threshold", "rise_at", "eval_full_precision"}


@pytest.mark.parametrize("name", [field.name for field in fields(dsq.DSQConfig)])
def test_an_option_that_changes_the_computation_must_be_the_checkpoints(name):
    fixed = {"format": "fixed"} if name == "fraction_bits" else {}
    saved = dsq.DSQConfig("[2,2,2,16] [16,4,4,16]", **fixed).as_dict()
    config = dsq.DSQConfig(**{"levels": saved["levels"], **fixed, name: OTHER[name]})
    if name in FREE:
        check_same(config, saved)
    else:
        with pytest.raises(InputError, match="differs from the checkpoint's"):
            check_same(config, saved)
