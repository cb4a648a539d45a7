"""What planned runs cost."""

import pytest

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from analysis.experiments.plan.costs import expected, level_costs
from analysis.experiments.plan.runs import PlannedRun, rises
from costmodel.paper.run_cost import Cost, weighed


def planned(levels: str, max_update: int = 100, **options: float | str) -> PlannedRun:
    return PlannedRun("x", "", None, {"levels": levels, "format": "bfp", **options}, 1, {"max-update": max_update})


def test_a_cost_is_weighed_by_the_moment_of_the_rise() -> None:
    levels = "[2,2,2,16] [16,4,4,16]"
    workload = "transformer_iwslt_de_en"
    low, high = level_costs(planned(levels), workload)
    assert (low.arithmetic, high.arithmetic) == pytest.approx((0.0148, 0.0983), abs=1e-4)
    assert (low.dram, high.dram) == pytest.approx((0.2016, 0.4375), abs=1e-4)
    quarter = Cost(0.25 * low.arithmetic + 0.75 * high.arithmetic, 0.25 * low.dram + 0.75 * high.dram)
    for moment in (0.25, 25, "25", "0.25"):
        assert expected(planned(levels, rise_at=moment), workload) == (quarter,)
    assert expected(planned(levels), workload) == (low, high)
    assert expected(planned("none"), workload) == ()
    again = weighed([low, high], [100, 300])
    assert (again.arithmetic, again.dram) == pytest.approx((quarter.arithmetic, quarter.dram))


def test_rises_of_a_run_that_epochs_bound() -> None:
    levels = "[2,2,2,16] [4,4,4,16] [16,4,4,16]"
    assert rises(planned(levels, rise_at="0.25 0.5")) == [0.25, 0.5]
    assert rises(planned(levels, max_update=0, rise_at="100 200")) is None
    assert rises(planned("[4,4,4,16]")) == []
