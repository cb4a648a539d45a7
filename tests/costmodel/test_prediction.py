"""The cost of a run, said before it starts."""

from typing import Any

import pytest

from dsq.costmodel import predicted
from dsq.costmodel.workloads.named import load_workload
from tests.costmodel.workloads.models import dump

WORKLOAD = dump(load_workload("transformer_iwslt_de_en"))
LOW, HIGH = "arithmetic 0.0148 at [2,2,2,16], 0.0983 at [16,4,4,16]", "DRAM 0.2016 at [2,2,2,16], 0.4375 at [16,4,4,16]"


def config(*levels: list[int], rise_at: tuple[float, ...] = ()) -> dict[str, Any]:
    return {"levels": list(levels), "rise_at": list(rise_at), "format": "bfp", "box": 16}


@pytest.mark.parametrize(("rise", "total"), [(0.25, 0), (0.25, 400), (100, 400)])
def test_levels_are_weighed_by_the_moment_of_the_rise(rise: float, total: int) -> None:
    said = predicted(config([2, 2, 2, 16], [16, 4, 4, 16], rise_at=(rise,)), WORKLOAD, total)
    assert said == f"{LOW}, 0.0775 in all; {HIGH}, 0.3785 in all"  # a quarter of the first, three of the second


@pytest.mark.parametrize("rises", [(), (100,)])
def test_where_plateaus_decide_or_the_end_is_not_known_it_is_a_range(rises: tuple[int, ...]) -> None:
    said = predicted(config([2, 2, 2, 16], [16, 4, 4, 16], rise_at=rises), WORKLOAD)
    assert said == f"{LOW}, 0.0148 to 0.0983 in all; {HIGH}, 0.2016 to 0.4375 in all"


def test_one_level_and_a_rise_that_does_not_come() -> None:
    assert predicted(config([16, 4, 4, 16]), WORKLOAD) == "arithmetic 0.0983 at [16,4,4,16]; DRAM 0.4375 at [16,4,4,16]"
    late = predicted(config([2, 2, 2, 16], [16, 4, 4, 16], rise_at=(500,)), WORKLOAD, 400)
    assert late == f"{LOW}, 0.0148 in all; {HIGH}, 0.2016 in all"
