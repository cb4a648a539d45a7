"""Read NumPy's numbers in fairseq's checkpoints (the counts of --eval-bleu) by functions that check their input.

NumPy's own functions are not safe to call from a file: np.ndarray takes a negative offset into its buffer, and
__setstate__ a dtype of object pointers. Under torch.load(weights_only=True), TRUSTED replaces their names in a pickle.
Accepted: float64 and int64, little-endian, as bytes of the stated length. UnpicklingError for anything else.
"""

import functools
import math
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

_DTYPES = {"f8": np.dtype("<f8"), "i8": np.dtype("<i8")}
_LITTLE_ENDIAN = (3, "<", None, None, None, -1, -1, 0)  # the state of both


def _refused(content: str) -> UnpicklingError:
    return UnpicklingError(f"accepted are NumPy's float64 and int64, as fairseq's BLEU counts are, got {content}")


class CountDtype:
    """A dtype in a checkpoint, chosen by its name alone."""

    dtype: np.dtype[Any]

    def __new__(cls, name: Any = None, *_: Any) -> "CountDtype":
        if not isinstance(name, str) or name not in _DTYPES:
            raise _refused("another dtype")
        self = super().__new__(cls)
        self.dtype = _DTYPES[name]
        return self

    def __setstate__(self, state: Any) -> None:
        if state != _LITTLE_ENDIAN:
            raise _refused("another state of a dtype")


class Counts(np.ndarray):
    """An array in a checkpoint, which can be filled once; it is saved as a NumPy array."""

    _filled = True  #: arrays computed from one cannot be filled

    def __new__(cls, *_: Any) -> "Counts":
        raise _refused("an array over a buffer")

    def __setstate__(self, state: Any) -> None:
        dtype, data = _numbers(state)
        shape = state[1]
        valid = isinstance(shape, tuple) and all(type(size) is int and 0 <= size <= len(data) for size in shape)
        if self._filled or not valid or math.prod(shape) * dtype.itemsize != len(data):
            raise _refused("an array of another shape than its bytes")
        self._filled = True  # a second filling would free memory that torch.from_numpy may have shared
        super().__setstate__((1, shape, dtype, state[3], data))  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return np.array(self).__reduce__()


def _numbers(state: Any) -> tuple[np.dtype[Any], bytes]:
    if not isinstance(state, tuple) or len(state) != 5 or state[0] != 1:
        raise _refused("another state of an array")
    _, _, dtype, by_columns, data = state
    if type(dtype) is not CountDtype or type(by_columns) is not bool or type(data) is not bytes:
        raise _refused("another state of an array")
    return dtype.dtype, data


def empty(kind: Any, shape: Any, typecode: Any) -> Counts:
    """Return an array for ``__setstate__`` to fill, in place of NumPy's ``_reconstruct``."""
    if kind is not Counts or shape != (0,) or typecode != b"b":
        raise _refused("another array")
    array = np.ndarray.__new__(Counts, (0,), np.int8)
    array._filled = False
    return array


def scalar(dtype: Any, data: Any) -> Any:
    """Return the number in ``data``, eight bytes, in place of NumPy's ``scalar``."""
    if type(dtype) is not CountDtype or type(data) is not bytes or len(data) != dtype.dtype.itemsize:
        raise _refused("another number")
    return np.frombuffer(data, dtype.dtype)[0]


#: the stand-in of each name, NumPy 1's and 2's
TRUSTED: list[Any] = [
    (CountDtype, "numpy.dtype"),
    (Counts, "numpy.ndarray"),
    *((empty, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


def reading_counts(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``load``, which reads NumPy's numbers by TRUSTED.

    In its calls alone: files that others load in this process hold other arrays.
    """

    @functools.wraps(load)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.serialization.safe_globals(TRUSTED):
            return load(*args, **kwargs)

    return call
