"""gact's hooks stay until an optimizer's step, which few of these tests make: no test meets another's."""

from collections.abc import Iterator

import pytest

from dsq.stash.saved_tensors.window import _take_off_windows


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    yield
    _take_off_windows()
