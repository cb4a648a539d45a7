"""A codec that rounds nothing, and a call under the table with it."""

import torch
from torch import nn

from dsq.stash.interception import Interception, RulePolicy
from dsq.stash.rules import RULES
from dsq.stash.stash import Stash


class Exactly:
    """Keeps values as they are, as a copy in memory order."""

    def encode(self, values, order, role):
        codes = (values.clone(memory_format=torch.contiguous_format).view(-1),)
        return codes, lambda saved, dtype: saved[0].to(dtype, copy=True)


def under_the_table(function, *args, codec=None, **named):
    """The result, and the stash that the rows made."""
    stash = Stash(codec or Exactly())
    with Interception(stash, RULES, RulePolicy(nn.Identity()), level=""):
        result = function(*args, **named)
    stash.end_forward()
    return result, stash
