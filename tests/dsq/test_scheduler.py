import json
import math

import numpy as np
import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import dsq

LEVELS = ("[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]")


def test_counts_may_be_tensors():
    scheduler = dsq.PrecisionScheduler(LEVELS[:1])
    scheduler.record(np.int64(1), torch.ones(100, dtype=torch.bool).sum())
    scheduler.record(tokens=torch.tensor(50))
    history = json.loads(json.dumps(scheduler.history()))
    assert history == {"levels": [{"precision": [2, 2, 2, 16], "updates": 2, "tokens": 150}]}


@pytest.mark.parametrize(
    ("key", "values"),
    [
        *(("levels", [None, [[2, 2]], 3]), ("level", [7, -1, 1.0, None])),
        *(("work", [[]]), ("validations_without_improvement", [-1, None])),
    ],
)
def test_a_bad_state_is_refused_and_none_of_it_taken(key, values):
    scheduler = dsq.PrecisionScheduler(LEVELS)
    before = scheduler.state_dict()
    good = {**before, "level": 1, "best": 2.0, "validations_without_improvement": 3}
    for value in values:
        with pytest.raises(ValueError, match=f"^{key} must be"):
            scheduler.load_state_dict({**good, key: value})
        assert scheduler.state_dict() == before


def test_a_loss_with_a_graph_leaves_a_number():
    scheduler = dsq.PrecisionScheduler(LEVELS, 1)
    scheduler.step(torch.ones((), requires_grad=True) * 2)
    with pytest.raises(TypeError, match=r"^loss must be a number, got tensor\(\["):
        scheduler.step(torch.ones(2))
    assert scheduler.state_dict()["best"] == 2.0
    assert type(scheduler.best) is float


def test_rise_at_in_fractions_of_the_run_and_a_warning_where_it_is_after_the_last_update():
    for percent in range(1, 100):
        rise = dsq.PrecisionScheduler(["[4,4,4,16]", "[16,4,4,16]"], rise_at=percent / 100, total_updates=100).rise_at
        assert rise == (percent,)
    with pytest.warns(UserWarning, match="the run has 10 updates, and none after 10: no level follows"):
        dsq.PrecisionScheduler(LEVELS, rise_at=(3, 10), total_updates=10)


def test_a_loss_that_is_not_finite_is_warned_of_and_no_improvement():
    scheduler = dsq.DSQConfig("[4,4,4,8] [8,4,8,8]", patience=2).scheduler()
    with pytest.warns(UserWarning, match=r"loss is nan at \[4,4,4,8\]: it is no improvement"):
        assert not scheduler.step(math.nan)
    with pytest.warns(UserWarning, match="loss is -inf"):
        assert scheduler.step(-math.inf)


def test_a_state_takes_the_validations_without_improvement_along():
    scheduler, resumed = (dsq.PrecisionScheduler(LEVELS, patience=3) for _ in range(2))
    for _ in range(3):
        scheduler.step(1.0)
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.step(1.0)
    assert resumed.level == 1


def test_the_mean_of_all_processes_decides():
    """PyTorch's fake backend leaves a sum as it is: of two processes, of which the other's loss is 0."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        scheduler = dsq.PrecisionScheduler(LEVELS)
        scheduler.step(4.0)
        assert scheduler.state_dict()["best"] == 2.0
    finally:
        torch.distributed.destroy_process_group()
