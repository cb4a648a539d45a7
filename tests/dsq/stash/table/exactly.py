"""What the tests of rows share: a codec that rounds nothing, and a call under it."""

import torch

from dsq.stash.codes import Stash
from dsq.stash.interception import Interception


class Exactly:
    """Keeps values as they are, as a copy in memory order."""

    def encode(self, values, order, kept):
        return (values.clone(memory_format=torch.contiguous_format).view(-1),), lambda saved, dtype: saved[0].to(dtype)


def under_the_table(function, *args, codec=None, **named):
    """The result, and the stash that the rows made."""
    stash = Stash(codec or Exactly())
    with Interception(stash):
        result = function(*args, **named)
    stash.forget()
    return result, stash
