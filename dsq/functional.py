"""The quantised operations as functions."""

from dsq.linear import linear

__all__ = ["linear"]
