"""Convert a model in place: give its linear layers quantized classes, and undo that.

Everything else that a conversion changes is a ``Change``, whose inverse the changed module holds.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeVar

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from dsq import stash
from dsq.arguments import whole_number
from dsq.config import DSQConfig
from dsq.first_training import forget
from dsq.formats import Format
from dsq.layers import mixed
from dsq.layers.attention import MultiheadAttention, OutProjection
from dsq.layers.blocks import plain_at_ends
from dsq.layers.experts_and_patches import Experts, PatchConv2d, is_experts
from dsq.layers.forwards import bound_forwards
from dsq.layers.own_products import OwnAttention, OwnProducts, attends, may_multiply
from dsq.linear import Linear
from dsq.ops.checks import of_another_quantization
from dsq.process_memory import suit_a_packed_stash
from dsq.quantizers import Quantized
from dsq.skipped import (
    RNNS,
    bound_forwards_of,
    cuts_patches,
    embedded,
    has_other_forward,
    matrices,
    quantized_parameters,
    skipped_modules,
)
from dsq.stash.controller import applied, intercept
from dsq.stash.methods.bfp import STASH_FORMAT

Model = TypeVar("Model", bound=nn.Module)

#: the options of DSQConfig that take effect in ``convert`` alone
_OPTIONS = ("exclude", "plain_ends", "tied", "stash", "attention", "adapters", "eval_full_precision")
#: what ``convert`` and the forward set on a quantized layer
_LAYER_FIELDS = (
    "quantizers_text",
    "eval_full_precision",
    "conversion",
    "graph_packs",
    "attending",
    "multiplied",
    "idle",
    "training_forwards",
    "evaluation_forwards",
    "small_flops",
)
#: of the model that ``convert`` was called with: the option ``stash``
_ROOT = "_dsq_root"
#: of a changed module: the changes that undo its conversion, in the order in which they were made
_UNDO = "_dsq_undo"
_STASH_ALONE = 'stash="all" packs the saved tensors of a model without products, such as a convolutional one'
#: changes a module and returns the Change that undoes it: a function of this file, or a partial of one, so that a model
#: can be pickled and copied
Change = Callable[[nn.Module], "Change"]


def convert(model: Model, config: DSQConfig | str | None = None, **options: Any) -> Model:
    """Convert the linear layers of ``model`` in place to quantized ones, at the first level of ``config``.

    nn.Linear becomes dsq.Linear. nn.MultiheadAttention, convolutions of non-overlapping patches, and transformers'
    Conv1D and experts become quantized classes of their own. In any other module, products with the module's own
    parameters are quantized at the call (layers/own_products.py). Only the class of a module changes: names,
    parameters, tying, initialization and state dict stay.

    Skipped are modules whose name matches ``config.exclude``, those of ``config.plain_ends`` (a recipe has its own),
    layers that share their weight with an embedding (unless ``config.tied``), routers of experts, and PEFT's adapters
    (unless ``config.adapters``). Fused paths that would bypass the layers are switched off. With ``stash="all"``, the
    default, dsq.stash's policy "bfp" is applied too, also to a model without any layer to convert, and on machines with
    huge pages ``dsq.release_memory`` is called.

    Warns if no layer was converted, if ``config.exclude`` matches none, or if under half of the multiplied parameters
    were converted (``dsq.report`` lists the skipped modules with reasons). At "auto" and at levels that only pack it
    warns instead if most of them are of RNNs, whose saved tensors stay exact.

    A layer that replaces a converted one later is not quantized: call transformers' ``resize_token_embeddings`` first.

    Args:
        model: any module.
        config: a DSQConfig, or the schedule as text, "[8,4,8,8]".
        options: beside text or None, other fields of DSQConfig.
    Returns:
        ``model``.
    Raises:
        TypeError: ``model`` is no module, or as ``DSQConfig.of``. ValueError: ``model`` was converted before.
    """
    config = DSQConfig.of(config, **options)
    if is_converted(model):
        cure = "use dsq.set_level to change its precision, or dsq.unconvert first"
        raise ValueError(f"model has been converted before; {cure}")
    if config.stash == "all":
        suit_a_packed_stash()
    try:
        excluded_values, other_values = _change(model, config)
    except BaseException:  # such as another policy of the model, or Ctrl-C
        _undo(model)
        raise
    if converted(model) and _only_packs(config):
        _warn_of_exact(model)
    elif converted(model):
        _warn_of_little(model, excluded_values + other_values)
    else:
        _warn_of_none(model, packed=config.stash == "all")
    if config.exclude is not None and not excluded_values:
        warnings.warn(f"exclude={config.exclude!r} matches no layer of the model", stacklevel=2)
    return model


def _change(model: nn.Module, config: DSQConfig) -> tuple[int, int]:
    """Make all changes of a conversion; return what ``change_classes`` does."""
    skipped_values = change_classes(model, config)
    layers = converted(model)
    for layer in layers.values():
        layer.eval_full_precision = config.eval_full_precision
        layer.conversion = {name: getattr(config, name) for name in _OPTIONS}
    if not layers and config.stash != "all":
        _undo(model)  # fused paths may run again
        return skipped_values
    if layers:
        set_level(model, config, 0)
        if config.attention:
            quantize_attention(model)
    if config.stash == "linears":
        change(model, bound_forwards)
    else:  # the policy bounds a forward
        change(model, partial(_add_stash, q1=None if layers else config.at(0).q1))
    change(model, partial(_set_attribute, name=_ROOT, value=config.stash))
    return skipped_values


def unconvert(model: Model) -> Model:
    """Give every converted layer of ``model`` its former class, in place, and undo everything else ``convert`` changed.

    Parameters stay as they are, and so do stash policies applied by hand. Returns ``model``. Raises TypeError if it is
    no module, ValueError if it was not converted.
    """
    if not is_converted(model):
        raise ValueError("model was not converted: there is nothing to undo")
    forget(converted(model).values())
    _undo(model)
    return model


@contextmanager
def as_unconverted(model: nn.Module) -> Iterator[None]:
    """Undo the conversion of ``model`` within the context."""
    if not is_converted(model):
        yield
        return
    layers = [(layer, type(layer), vars(layer).copy()) for layer in converted(model).values()]
    changes = _undo(model)
    try:
        yield
    finally:
        for layer, kind, fields in layers:
            _assign_class(layer, kind)
            vars(layer).update({name: fields[name] for name in _LAYER_FIELDS if name in fields})
        for module, redo in changes:
            change(module, redo)


def _undo(model: nn.Module) -> list[tuple[nn.Module, Change]]:
    """Undo the conversion of ``model``; return the changes that would redo it, layers apart, in order."""
    for layer in converted(model).values():
        for name in _LAYER_FIELDS:
            vars(layer).pop(name, None)
        set_class(layer, layer.original)
    changes = [
        (module, undo(module)) for module in list(model.modules()) for undo in reversed(vars(module).pop(_UNDO, []))
    ]
    return changes[::-1]


def converted(model: nn.Module) -> dict[str, Any]:
    """Return the converted layers of ``model`` by name; each has ``quantizers``. Raises TypeError for no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return {name: module for name, module in model.named_modules() if isinstance(module, Quantized)}


def is_converted(model: nn.Module) -> bool:
    """Return whether ``convert`` changed ``model``: it has converted layers, or a packed stash alone."""
    return bool(converted(model)) or vars(model).get(_ROOT) == "all"


def is_conversion_root(module: nn.Module) -> bool:
    """Return whether ``convert`` was called with this very module, and changed it."""
    return _ROOT in vars(module)


def converted_parts(model: nn.Module) -> list[nn.Module]:
    """Return the parts of ``model`` that ``convert`` was called with, if it was not called with all of it.

    The list is empty if all modules around one such part are wrappers with a single child, such as DDP.
    """
    parts = list(filter(is_conversion_root, model.modules()))
    members = {module for part in parts for module in part.modules()}
    wrappers = [module for module in model.modules() if module not in members]
    return parts if any(len(list(module.children())) != 1 for module in wrappers) else []


def check_conversion(model: nn.Module, config: DSQConfig, of: str = "config") -> None:
    """Raise ValueError if ``model`` was converted with other options than those of ``config``, whose name is ``of``."""
    for layer in converted(model).values():
        for name, value in layer.conversion.items():
            if (got := getattr(config, name)) != value:
                text = f"{of} must have {name}={value!r}, as the model was converted, got {got!r}"
                raise ValueError(f"{text}: use the same value in both, or call dsq.unconvert(model) first")


def set_level(model: nn.Module, config: DSQConfig, level: int) -> None:
    """Set every converted layer of ``model`` to ``config.levels[level]``; if it has none, its stash policy.

    Raises TypeError if ``model`` is no module, ValueError if ``level`` is out of range or ``model`` was not converted.
    """
    level = whole_number("level", level, 0, len(config.levels) - 1)
    layers, quantizers = converted(model), config.at(level)
    if not is_converted(model):
        raise ValueError(f"model has no converted layers: call dsq.convert first; {_STASH_ALONE}")
    forget(layers.values(), but=lambda hook: hook.is_awaited_of(model))
    for module in layers.values():
        module.quantizers = quantizers
    if not layers:
        _set_stash_format(model, quantizers.q1)


def _warn_of_little(model: nn.Module, excluded: int) -> None:
    """Warn if most multiplied parameters were skipped, other than the ``excluded`` ones."""
    quantized = quantized_parameters(model)
    skipped = sum(entry.parameters for entry in skipped_modules(model)) - excluded
    if quantized < skipped:
        text = (
            f"only {quantized / (quantized + skipped):.0%} of the parameters that are multiplied were converted; "
            "dsq.report(model, *inputs) lists the skipped modules with reasons"
        )
        warnings.warn(text, stacklevel=3)


def _only_packs(config: DSQConfig) -> bool:
    """Return whether ``config`` packs all saved tensors, and names no level that quantizes products."""
    modes = {config.at(level).mode for level in range(len(config.levels))}
    return config.stash == "all" and (config.undecided or modes == {"saving"})


def _warn_of_exact(model: nn.Module) -> None:
    """Warn if most multiplied parameters are of RNNs, whose saved tensors no rule packs."""
    skipped = skipped_modules(model)
    rnns = [entry for entry in skipped if isinstance(model.get_submodule(entry.name), RNNS)]
    exact = sum(entry.parameters for entry in rnns)
    all_parameters = quantized_parameters(model) + sum(entry.parameters for entry in skipped)
    if 2 * exact > all_parameters:
        kinds = ", ".join(sorted({entry.kind for entry in rnns}))
        text = (
            f"{exact / all_parameters:.0%} of the parameters that are multiplied are of {kinds}, whose saved tensors "
        )
        warnings.warn(f"{text}stay exact; dsq.report(model, *inputs) shows their share", stacklevel=3)


def _warn_of_none(model: nn.Module, packed: bool) -> None:
    effect = "only its saved tensors are packed" if packed else f"nothing changes; {_STASH_ALONE}"
    reasons = "".join(f"; {entry.name or entry.kind}: {entry.reason}" for entry in skipped_modules(model)[:2])
    warnings.warn(f"model has no product to convert: {effect}{reasons}", stacklevel=3)


# ---- which modules become quantized

#: quantized classes by the classes that they replace
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    kind.original: kind for kind in (Linear, MultiheadAttention, OutProjection)
}


def change_classes(model: nn.Module, config: DSQConfig) -> tuple[int, int]:
    """Give the layers of ``model`` their quantized classes, and switch off fused paths that would bypass them.

    Returns the number of parameters in matrices that ``config.exclude`` skipped, and in those that
    ``config.plain_ends`` skipped or that are tied to an embedding.
    """
    pattern = None if config.exclude is None else re.compile(config.exclude)
    tables = set() if config.tied else embedded(model)
    ends = set() if config.plain_ends is None else plain_at_ends(model, config.plain_ends)
    adapters = set() if config.adapters else _adapters(model)
    attentions = set[str]()
    excluded_numel = other_numel = 0
    for name, module in list(model.named_modules()):
        kind = None if module in adapters else quantized_class(module)
        if kind is None:
            _switch_off_fused_path(module)
            continue
        if kind is OutProjection and name.rpartition(".")[0] not in attentions:
            continue  # of a skipped attention, which reads its weight and never calls it
        weights = matrices(module)
        if pattern is not None and pattern.search(name):
            excluded_numel += max(1, sum(p.numel() for p in weights))
        elif module in ends or any(id(p) in tables for p in weights):
            other_numel += sum(p.numel() for p in weights)
        else:
            set_class(module, kind)
            attentions |= {name} if kind is MultiheadAttention else set()
    return excluded_numel, other_numel


def quantized_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the quantized class for ``module``; None if it has none."""
    kind = class_of(module)
    if has_other_forward(module):
        return None
    if any(p.is_complex() or of_another_quantization(p) for p in module.parameters(recurse=False)):
        return None
    if kind in _CLASSES:
        return _CLASSES[kind]
    if kind is nn.Conv2d and cuts_patches(module):
        return PatchConv2d
    if is_experts(module):
        return mixed(Experts, kind)
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None and kind is transformers.Conv1D:
        from dsq.layers.of_transformers import Conv1D  # needs transformers

        return Conv1D
    return mixed(OwnProducts, kind) if may_multiply(module) else None


def quantize_attention(model: nn.Module) -> None:
    """Quantize the products of attention, in models of transformers and in modules that multiply by themselves."""
    configured = set[nn.Module]()  # by the setting of a model around them
    for module in list[Any](model.modules()):
        if not isinstance(module, Quantized) and attends(module, class_of(module)):
            change(module, partial(set_class, kind=mixed(OwnAttention, class_of(module))))
        elif hasattr(module, "set_attn_implementation") and module not in configured:
            from dsq.layers.of_transformers import NAME  # needs transformers

            configured |= set(module.modules())
            change(module, partial(_set_attention, name=NAME))
        elif isinstance(module, OwnProducts):
            module.attending = attends(module, module.original)


def _adapters(model: nn.Module) -> set[nn.Module]:
    """Return the low-rank layers that PEFT added."""
    tuners: list[Any] = [module for module in model.modules() if hasattr(module, "adapter_layer_names")]
    layers = (getattr(tuner, name, None) for tuner in tuners for name in tuner.adapter_layer_names)
    return {adapter for layer in layers if isinstance(layer, nn.Module) for adapter in layer.modules()}


def _switch_off_fused_path(module: nn.Module) -> None:
    """Let ``module``, whose class stays, call its linear layers instead of reading their weights."""
    if isinstance(module, nn.TransformerEncoderLayer):
        # excludes its fused evaluation path
        change(module, partial(_set_attribute, name="activation_relu_or_gelu", value=0))
    elif isinstance(module, nn.TransformerEncoder):
        change(module, partial(_set_attribute, name="use_nested_tensor", value=False))  # nested tensors need that path
    elif getattr(module, "skip_embed_dim_check", None) is False:
        # otherwise fairseq's attention passes its weights to PyTorch's function
        change(module, partial(_set_attribute, name="skip_embed_dim_check", value=True))


# ---- changes beside the classes of layers, which can be undone


def change(module: nn.Module, do: Change) -> None:
    """Change ``module``, and let it hold the change that undoes this one."""
    vars(module).setdefault(_UNDO, []).append(do(module))


def _set_attribute(module: nn.Module, name: str, value: Any) -> Change:
    undo = (
        partial(_set_attribute, name=name, value=vars(module)[name])
        if name in vars(module)
        else partial(_delete_attribute, name=name)
    )
    vars(module)[name] = value
    return undo


def _delete_attribute(module: nn.Module, name: str) -> Change:
    return partial(_set_attribute, name=name, value=vars(module).pop(name))


def _set_attention(model: Any, name: str) -> Change:
    """Set the attention function of a model of transformers."""
    undo = partial(_set_attention, name=model.config._attn_implementation)
    model.set_attn_implementation(name)
    return undo


def _add_stash(model: nn.Module, q1: Format | None, policy: Any = None) -> Change:
    """Apply the policy "bfp", in the format ``q1``; None: in that of the model's layers.

    ``policy``: that of an earlier application, with what it knows of the model's graphs and latest forward.
    """
    if policy is None:
        stash.apply(model, "bfp")
    else:
        intercept(policy, model)
    _set_stash_format(model, q1)
    return _remove_stash


def _remove_stash(model: nn.Module) -> Change:
    policy: Any = applied(model)["bfp"]
    policy.remove(model)  # of this model alone: a deep copy shares the policy
    return partial(_add_stash, q1=vars(model).pop(STASH_FORMAT, None), policy=policy)


def _set_stash_format(model: nn.Module, q1: Format | None) -> None:
    if q1 is not None:
        vars(model)[STASH_FORMAT] = q1


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module`` without the subclass that fully_shard or a parametrization made of it."""
    fsdp, kind = sys.modules.get("torch.distributed.fsdp"), type(module)
    if fsdp is not None and kind.__bases__[0] is fsdp.FSDPModule:
        return kind.__bases__[1]
    return kind.__bases__[0] if is_parametrized(module) else kind


def set_class(module: nn.Module, kind: type[nn.Module]) -> Change:
    """Give ``module`` another class; it stays sharded by fully_shard, or parametrized."""
    subclass, former = type(module), class_of(module)
    undo = partial(set_class, kind=former)
    if former is subclass.__bases__[0] and is_parametrized(module):  # the subclass has the parameters' properties
        namespace = {name: value for name, value in vars(subclass).items() if name not in ("__dict__", "__weakref__")}
        kind = type(f"Parametrized{kind.__name__}", (kind,), namespace)
    elif former is not subclass:  # as fully_shard makes its classes
        deep_copy = vars(subclass)["__deepcopy__"]
        kind = type(f"FSDP{kind.__name__}", (subclass.__bases__[0], kind), {"__deepcopy__": deep_copy})
    _assign_class(module, kind)
    return undo


def _assign_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Set the class of ``module``, and bind its forward where that of the former class was bound."""
    names = bound_forwards_of(module)
    module.__class__ = kind
    for name in names:
        vars(module)[name] = MethodType(kind.forward, module)
