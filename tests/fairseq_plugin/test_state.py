"""The updates of a run."""

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from fairseq_plugin.state import total_updates


@pytest.mark.parametrize(
    ("max_update", "max_epoch", "update_freq", "skip", "expected"),
    [
        (0, 0, [1], False, 0),
        (7, 0, [1], False, 7),
        (0, 3, [1], False, 30),
        (100, 3, [1], False, 30),
        (7, 3, [1], False, 7),
        (0, 3, [4], False, 9),
        (0, 3, [4], True, 6),
        (0, 4, [1, 2], False, 10 + 3 * 5),
        (0, 1, [1, 2], False, 10),
    ],
)
def test_what_comes_first_ends_a_run_of_ten_batches_an_epoch(max_update, max_epoch, update_freq, skip, expected):
    given = {"max_update": max_update, "max_epoch": max_epoch, "update_freq": update_freq}
    assert total_updates(SimpleNamespace(**given, skip_remainder_batch=skip), 10) == expected
