"""The first cases of the fuzzer; .ci/fuzz runs as many as its minutes allow."""

from tests.kernels.fuzz import KINDS, run_case
from tests.threads import threads


def test_the_first_cases() -> None:
    with threads(1):
        kinds = {run_case(number) for number in range(60)}
    assert kinds == {kind.__name__ for kind in KINDS}
