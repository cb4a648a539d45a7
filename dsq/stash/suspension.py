"""A model's forward without its stash policies, for a while: what a comparison with the exact gradient runs.

Interim: it takes the hooks of the controllers away and gives the classes back that they swapped. Segments of the policy
"checkpoint" go on being recomputed, which changes no number.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from dsq.stash.controller import APPLIED
from dsq.stash.saved_tensors.hooks import take_off_leftovers


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Run the forward of ``model`` inside as if no stash policy were applied to it or to a module in it.

    Compiled blocks pack in their graphs: let them run eagerly (``dsq.stash.compiled.run_eagerly``).
    """
    take_off_leftovers()
    hooks, swapped = set[int](), list[tuple[nn.Module, type[nn.Module]]]()
    for owner in model.modules():
        for controller in owner.__dict__.get(APPLIED, {}).values():
            twins = dict(zip(controller.model.modules(), owner.modules(), strict=False))  # owner may be a deep copy
            for step, args in controller.undo._steps:
                if step is setattr and args[1] == "__class__":
                    swapped.append((twins.get(args[0], args[0]), args[2]))
                hooks |= {arg.id for arg in args if not isinstance(arg, nn.Module) and hasattr(arg, "id")}
    with ExitStack() as stack:
        for module in model.modules() if hooks else ():
            for table in (module._forward_pre_hooks, module._forward_hooks):
                if not hooks.isdisjoint(table):
                    stack.callback(_restore, table, dict(table))
                    for key in hooks.intersection(table):
                        del table[key]
        for module, kind in swapped:
            stack.callback(setattr, module, "__class__", type(module))
            module.__class__ = kind
        yield


def _restore(table: dict[int, Any], before: dict[int, Any]) -> None:
    """Put hooks back in the order that they had, before those that were registered since."""
    since = {key: hook for key, hook in table.items() if key not in before}
    table.clear()
    table.update(before | since)
