"""No test leaves hooks on saved tensors behind."""

from collections.abc import Iterator

import pytest

from dsq.stash.interception import innermost_hooks


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    yield
    assert innermost_hooks() is None
