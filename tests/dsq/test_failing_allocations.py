"""Out of memory at any allocation of a step: an exception, nothing kept, and the next step has the right bits."""

import pytest

from analysis.stash.allocator import compiler, figures
from tests.dsq.failing_allocations import CASES

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler, or no glibc")
QUICK = [name for name in CASES if not name.startswith("encoder")]
LONG = [name for name in CASES if name.startswith("encoder") and not name.endswith("gact adapted")]


@pytest.mark.parametrize("names", [QUICK, *(pytest.param([name], id=name, marks=pytest.mark.soak) for name in LONG)])
def test_every_allocation_fails_once(names: list[str]) -> None:
    for name, outcome in figures("tests.dsq.failing_allocations", *names).items():
        assert outcome["allocations"] > 10, name
        assert outcome["raised"] == outcome["allocations"], name
        assert outcome["wrong"] == [], name
        assert outcome["leaked"] < 4096, name  # less than any of its tensors, a failure
