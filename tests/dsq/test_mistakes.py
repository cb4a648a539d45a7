"""Natural mistakes, each answered in one line that says what is accepted."""

import pytest
import torch
from torch import nn

import dsq


def net():
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def converted(**options):
    return dsq.convert(net(), dsq.DSQConfig(**options))


LEVELS = "[4,4,4,16] [16,4,4,16]"
CONVERT = "convert takes a torch.nn.Module and a DSQConfig"
ONE, TWO = dsq.DSQConfig("[4,4,4,16]").scheduler(), dsq.DSQConfig(LEVELS).scheduler()
MISTAKES = {
    "no precision": (lambda: dsq.DSQConfig(levels="4 bits"), r"precision must be four whole numbers in 2..32, as in"),
    "falling levels": (lambda: dsq.DSQConfig(levels="[16,4,4,16] [4,4,4,16]"), "levels must be precisions that never"),
    "two levels in Precision.parse": (lambda: dsq.Precision.parse(LEVELS), r"precision must be four whole numbers"),
    "two levels for one layer": (lambda: dsq.Linear(32, 32, precision=LEVELS), r"precision must be four whole numbers"),
    "text for a config": (lambda: dsq.convert(net(), LEVELS), CONVERT),
    "config before model": (
        lambda: dsq.convert(dsq.DSQConfig(), net()),
        CONVERT,
    ),
    "a class for a model": (lambda: dsq.convert(nn.Linear), CONVERT),
    "convert twice": (lambda: dsq.convert(converted()), "model has been converted before; use dsq.set_level"),
    "set_level of a plain model": (
        lambda: dsq.set_level(net(), dsq.DSQConfig(), 0),
        "no converted layers",
    ),
    "a precision for a level": (
        lambda: dsq.set_level(converted(), dsq.DSQConfig(), "[16,4,4,16]"),
        r"level must be a whole number in 0..1, got '\[16,4,4,16\]'",
    ),
    "a level too high": (
        lambda: dsq.set_level(converted(), dsq.DSQConfig(), 2),
        r"level must be a whole number in 0..1",
    ),
    "a foreign config": (
        lambda: dsq.set_level(converted(), {"levels": LEVELS}, 0),
        "set_level takes a torch.nn.Module and a DSQConfig",
    ),
    "an unknown format": (lambda: dsq.DSQConfig(format="int4"), "format must be one of .*bfp"),
    "bits for a format": (lambda: dsq.quantize(torch.ones(4), 4), r"fmt must be a format, as dsq.BFP\(4\), got 4"),
    "integers to quantise": (lambda: dsq.pack(torch.arange(4), dsq.BFP(4)), "x must be a floating tensor"),
    "another state": (lambda: dsq.load_state_dict(net(), net().state_dict()), "as dsq.state_dict gives it"),
    "another schedule's state": (
        lambda: (
            dsq.DSQConfig(levels="[4,4,4,16]").scheduler().load_state_dict(dsq.DSQConfig().scheduler().state_dict())
        ),
        "levels must be those of the checkpoint",
    ),
    "an unknown policy": (lambda: dsq.stash.apply(net(), "4bit"), "policy must be one of bfloat16, bfp"),
    "an option of another policy": (
        lambda: dsq.stash.apply(net(), "bfp", ratio=0.3),
        "has no option 'ratio'",
    ),
    "a result, not a forward": (
        lambda: dsq.stash.measure(net()(torch.ones(32))),
        "fn must be a function",
    ),
    "nothing to take back": (lambda: dsq.unconvert(net()), "no converted layers: there is nothing to take back"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_line_helps(name):
    make, message = MISTAKES[name]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_list_as_levels_is_a_schedule():
    schedule = dsq.DSQConfig(LEVELS).levels
    assert dsq.DSQConfig([[4, 4, 4, 16], [16, 4, 4, 16]]).levels == schedule
    assert dsq.DSQConfig(["[4,4,4,16]", "[16,4,4,16]"]).levels == schedule
    assert dsq.DSQConfig([4, 4, 4, 16]).levels == schedule[:1]
