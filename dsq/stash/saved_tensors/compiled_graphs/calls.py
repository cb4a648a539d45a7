"""Nodes put into a compiled graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves


def call(function: Callable[..., Any], *args: Any) -> Node:
    """``function(*args)`` where the graph of its first argument inserts nodes."""
    node: Node = args[0].graph.call_function(function, args)
    values: Any = torch.fx.node.map_arg(args, lambda arg: arg.meta["val"])
    fake = next(value for value in tree_leaves(values) if isinstance(value, Tensor))
    with fake.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = function(*values)
    return node
