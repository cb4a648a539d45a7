"""The stash policies side by side: ``python -m analysis.stash.compare|train``."""
