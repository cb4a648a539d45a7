"""Each test compiles afresh."""

import pytest


@pytest.fixture(autouse=True)
def _fresh(fresh_compiler):
    pass
