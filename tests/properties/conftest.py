"""Properties over values that hypothesis draws: the same ones in every run."""

from hypothesis import settings

settings.register_profile("deterministic", derandomize=True, deadline=None, max_examples=100, database=None)
settings.load_profile("deterministic")
