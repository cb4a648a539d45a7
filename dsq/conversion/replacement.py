"""A layer that is put in the place of a converted one later is converted as that was."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch._C._dynamo import eval_frame
from torch.nn.modules.module import register_module_module_registration_hook

from dsq.conversion.classes import quantised_class
from dsq.conversion.module_settings import class_of, set_class
from dsq.quantizers import Quantised

#: what ``convert`` puts on a layer
FIELDS = ("quantizers", "eval_full_precision", "quantised_products", "conversion")


def take_fields(layer: nn.Module, fields: Mapping[str, Any]) -> None:
    layer.__dict__.update({name: fields[name] for name in FIELDS if name in fields})


def _convert_replacement(parent: nn.Module, name: str, new: nn.Module | None) -> None:
    """Convert ``new``, which becomes the child ``name`` of ``parent``, as the layer was whose place it takes.

    Warns where it cannot be, as layers of another quantisation.
    """
    old = parent._modules.get(name)
    if not isinstance(old, Quantised) or new is None:
        return
    for before, after in zip(old.modules(), new.modules(), strict=False):  # an attention's projections too
        if isinstance(before, Quantised) and (kind := quantised_class(after)) is class_of(before):
            set_class(after, kind)
            take_fields(after, before.__dict__)
    quantised = any(isinstance(module, Quantised) for module in new.modules())
    if next(new.parameters(), None) is not None and not quantised:
        text = f"the {type(new).__name__} that takes the place of the converted layer {name!r} is not quantised by dsq"
        warnings.warn(text, stacklevel=3)


register_module_module_registration_hook(_convert_replacement)
# torch._dynamo.skip_code without its import, which takes a second: a compiler that makes a module while it runs would
# trace the hook, and compiled autograd fails there
_SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
eval_frame.set_code_exec_strategy(_convert_replacement.__code__, _SKIPPED)
