"""The registry of PyTorch operators ``torch.ops.dsq.*``."""

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("dsq", "DEF")


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register ``torch.ops.dsq.NAME`` for a ``schema`` "NAME(...) -> ...", and its fake, which gives shapes only."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsq::{name}", fake, lib=_library)
