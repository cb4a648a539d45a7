"""The schedule of any losses: against the rule in a few lines, and broken off anywhere."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from dsq import PrecisionScheduler

LEVELS = ["[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]"]
losses = st.lists(st.floats(-10, 10) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=40)
patiences = st.integers(1, 6)
thresholds = st.floats(0, 0.9)


@given(losses, patiences, thresholds)
def test_the_level_rises_after_so_many_validations_without_a_better_one(losses, patience, threshold) -> None:
    scheduler = PrecisionScheduler(LEVELS, patience, threshold)
    level, since, best = 0, 0, math.inf
    for loss in losses:
        limit = best - threshold * abs(best) if math.isfinite(best) else best
        better = math.isfinite(loss) and loss < limit
        best, since = (loss, 0) if better else (best, since + 1)
        rises = since >= patience and level < 2
        if rises:
            level, since, best = level + 1, 0, math.inf
        assert scheduler.step(loss) == rises
        assert scheduler.level == level


@given(losses, patiences, thresholds, st.integers(0, 40), st.lists(st.integers(0, 9), min_size=40, max_size=40))
def test_going_on_from_a_state_equals_going_on(losses, patience, threshold, cut, tokens) -> None:
    unbroken, broken = (PrecisionScheduler(LEVELS, patience, threshold) for _ in range(2))
    for index, loss in enumerate(losses):
        if index == cut:
            state = json.loads(json.dumps(broken.state_dict()))
            broken = PrecisionScheduler(LEVELS, patience, threshold)
            broken.load_state_dict(state)
        for scheduler in (unbroken, broken):
            scheduler.record(1, tokens[index])
        assert unbroken.step(loss) == broken.step(loss)
    assert unbroken.state_dict() == broken.state_dict()
    assert sum(work.tokens for work in unbroken.work) == sum(tokens[: len(losses)])
    assert sum(work.updates for work in unbroken.work) == len(losses)


@given(st.integers(2, 200), st.lists(st.integers(1, 7), min_size=1, max_size=80))
def test_rises_at_given_updates_alone_and_in_a_resumed_run_too(total, steps) -> None:
    scheduler, level, work = PrecisionScheduler(LEVELS, 1, rise_at=(0.25, 0.75), total_updates=total), 0, [0, 0, 0]
    for updates in steps:
        state = json.loads(json.dumps(scheduler.state_dict()))
        scheduler = PrecisionScheduler(LEVELS, 1, rise_at=(0.25, 0.75), total_updates=total)
        scheduler.load_state_dict(state)
        work[level] += updates
        before, level = level, sum(sum(work) >= math.ceil(total * part) for part in (0.25, 0.75))
        assert scheduler.record(updates, tokens=10) == (level > before)
        assert not scheduler.step(9.0)
        assert (scheduler.level, [done.updates for done in scheduler.work]) == (level, work)
