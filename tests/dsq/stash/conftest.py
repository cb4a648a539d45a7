"""gact's hooks stay until an optimizer's step, which few of these tests make: no test meets another's."""

from collections.abc import Iterator

import pytest

from dsq.stash.saved_tensors.hooks import innermost_hooks, take_off_leftovers


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    yield
    take_off_leftovers()
    assert innermost_hooks() is None
