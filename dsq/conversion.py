"""Let a model that nobody rewrote train with DSQ: which modules become quantized, what else changes, and back again."""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from dsq import stash
from dsq.arguments import whole_number
from dsq.config import DSQConfig
from dsq.layers import mixed
from dsq.layers.attention import MultiheadAttention, OutProjection
from dsq.layers.blocks import plain_at_ends
from dsq.layers.experts_and_patches import Experts, PatchConv2d, cuts_patches, is_experts
from dsq.layers.forwards import bound_forwards, free_forwards
from dsq.layers.own_products import OwnAttention, OwnProducts, calls_attention, multiplies
from dsq.linear import Linear, of_another_quantization
from dsq.process_memory import suit_a_packed_stash
from dsq.quantizers import Quantized
from dsq.skipped import embedded, matrices, quantized_parameters, skipped_modules
from dsq.stash.controller import applied

Model = TypeVar("Model", bound=nn.Module)

#: fields of DSQConfig that it alone acts on
_OF_CONVERSION = ("exclude", "plain_ends", "tied", "stash", "attention", "adapters", "eval_full_precision")
_STASH_ALONE = 'stash="all" packs what a model without products keeps, as one of convolutions'


def convert(model: Model, config: DSQConfig | str | None = None, **options: Any) -> Model:
    """Turn the linear layers of ``model`` into quantized ones at the first level of ``config``, in place.

    nn.Linear becomes dsq.Linear; nn.MultiheadAttention, convolutions that cut patches, and transformers' Conv1D and
    experts become their quantized selves. In any other module the products with parameters of its own are quantized as
    they are called (layers/own_products.py). Only the class of a module changes: names, parameters, tying,
    initialization and state dict stay. Modules whose name matches ``config.exclude``, those of ``config.plain_ends``
    (a recipe has its own), those whose weight is an
    embedding's too (unless ``config.tied``), routers of experts and PEFT's adapters are left alone. Fused paths that
    would read the weights past the layers are switched off. Warns where nothing was converted, where under half of the
    parameters that are multiplied were (``dsq.report`` says what was left, and why), or where ``config.exclude``
    matches nothing that would have been. With ``config.stash`` "all", the default, dsq.stash's policy "bfp" is applied
    too, also to a model of which nothing else is converted, and where there are huge pages ``dsq.release_memory`` is
    called.

    A layer that later takes the place of a converted one is plain: transformers' ``resize_token_embeddings`` comes
    first.

    ``config`` may be the schedule as text, "[8,4,8,8]", and ``options`` the other fields of DSQConfig.

    Returns ``model``. Raises TypeError where ``model`` is no module, or for what ``DSQConfig.of`` refuses; ValueError
    where the model has been converted before.
    """
    config = DSQConfig.of(config, **options)
    if is_converted(model):
        known = "use dsq.set_level to change its precision, or dsq.unconvert first"
        raise ValueError(f"model has been converted before; {known}")
    if config.stash == "all":
        suit_a_packed_stash()
    excluded, others = change_classes(model, config)
    layers = converted(model)
    for layer in layers.values():
        layer.eval_full_precision = config.eval_full_precision
        layer.conversion = {name: getattr(config, name) for name in _OF_CONVERSION}
    if layers:
        set_level(model, config, 0)
        bound_forwards(model)
        if config.attention:
            quantize_attention(model)
    if config.stash == "all":
        try:
            change(model, "stash", True if layers else config.at(0).q1)
        except ValueError:  # the model has another policy: as if convert had not been called
            if layers:
                unconvert(model)
            raise
    if is_converted(model):
        change(model, "whole", True)
    if layers:
        _warn_of_little(model, excluded + others)
    else:
        _warn_of_none(model, packed=config.stash == "all")
    if config.exclude is not None and not excluded:
        warnings.warn(f"exclude={config.exclude!r} matches no layer of the model", stacklevel=2)
    return model


def unconvert(model: Model) -> Model:
    """Give every converted layer of ``model`` the class that it had, in place, and take away what ``convert`` added.

    Parameters stay as they are. Stash policies applied by hand stay too. Returns ``model``. Raises TypeError where it
    is no module, ValueError where it was not converted.
    """
    if not is_converted(model):
        raise ValueError("model was not converted: there is nothing to take back")
    for layer in converted(model).values():
        for name in FIELDS:
            layer.__dict__.pop(name, None)
        set_class(layer, layer.plain)
    free_forwards(model)
    for module in list(model.modules()):
        for name, value in module.__dict__.pop(_BEFORE, {}).items():
            _set(module, name, value)
    return model


@contextmanager
def as_plain(model: nn.Module) -> Iterator[None]:
    """Give ``model`` back what it was before conversion, while inside."""
    if not is_converted(model):
        yield
        return
    own = [(layer, type(layer), layer.__dict__.copy()) for layer in converted(model).values()]
    changed = [
        (module, name, _get(module, name)) for module in model.modules() for name in module.__dict__.get(_BEFORE, ())
    ]
    unconvert(model)
    try:
        yield
    finally:
        for layer, kind, fields in own:
            layer.__class__ = kind
            layer.__dict__.update({name: fields[name] for name in FIELDS if name in fields})
        bound_forwards(model)
        for setting in changed:
            change(*setting)


def converted(model: nn.Module) -> dict[str, Any]:
    """Return the converted layers of ``model`` by name; each has ``quantizers``. Raises TypeError for no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return {name: module for name, module in model.named_modules() if isinstance(module, Quantized)}


def is_converted(model: nn.Module) -> bool:
    """Return whether ``convert`` changed ``model``: it has converted layers, or a packed stash alone."""
    return bool(converted(model)) or "stash" in vars(model).get(_BEFORE, ())


def converted_parts(model: nn.Module) -> list[nn.Module]:
    """Return the parts of ``model`` that ``convert`` was called with, where it was not with the whole.

    None where the modules around one such part are wrappers, as DDP, which hold it and nothing else.
    """
    parts = [module for module in model.modules() if _get(module, "whole")]
    inside = {module for part in parts for module in part.modules()}
    around = [module for module in model.modules() if module not in inside]
    return parts if any(len(list(module.children())) != 1 for module in around) else []


def check_conversion(model: nn.Module, config: DSQConfig, of: str = "config") -> None:
    """Raise ValueError where ``model`` was converted by a config that differs in what ``convert`` alone acts on."""
    for layer in converted(model).values():
        for name, value in layer.conversion.items():
            if (got := getattr(config, name)) != value:
                text = f"{of} must have {name}={value!r}, as the model was converted, got {got!r}"
                raise ValueError(f"{text}: say the same to both, or call dsq.unconvert(model) between")


def set_level(model: nn.Module, config: DSQConfig, level: int) -> None:
    """Set every converted layer of ``model``, or its stash where that alone is packed, to ``config.levels[level]``.

    Raises TypeError where ``model`` is no module, ValueError for a level that the config has not, or a model that was
    not converted.
    """
    level = whole_number("level", level, 0, len(config.levels) - 1)
    layers, quantizers = converted(model), config.at(level)
    if not is_converted(model):
        raise ValueError(f"model has no converted layers: dsq.convert did not run, or found none; {_STASH_ALONE}")
    for module in layers.values():
        module.quantizers = quantizers
    if not layers:
        applied(model)["bfp"].q1 = quantizers.q1  # type: ignore[attr-defined]


def _warn_of_little(model: nn.Module, chosen: int) -> None:
    quantized, plain = quantized_parameters(model), sum(entry.parameters for entry in skipped_modules(model)) - chosen
    if quantized < plain:
        text = (
            f"only {quantized / (quantized + plain):.0%} of the parameters that are multiplied were converted; "
            "dsq.report(model, *inputs) says what was left, and why"
        )
        warnings.warn(text, stacklevel=3)


def _warn_of_none(model: nn.Module, packed: bool) -> None:
    stays = "what operations of dsq.stash's table keep is packed" if packed else f"it stays as it is; {_STASH_ALONE}"
    left = "".join(f"; {it.name or it.kind}: {it.reason}" for it in skipped_modules(model)[:2])
    warnings.warn(f"model has no product to convert: {stays}{left}", stacklevel=3)


# ---- which modules become quantized

#: quantized classes by the plain ones whose place they take
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {it.plain: it for it in (Linear, MultiheadAttention, OutProjection)}


def change_classes(model: nn.Module, config: DSQConfig) -> tuple[int, int]:
    """Give the layers of ``model`` their quantized classes, and switch off what would read their weights past them.

    Returns how many values the matrices hold that ``config.exclude`` left out, and how many those that
    ``config.plain_ends`` left out, or that are an embedding's too.
    """
    pattern = None if config.exclude is None else re.compile(config.exclude)
    tables = set() if config.tied else embedded(model)
    ends = set() if config.plain_ends is None else plain_at_ends(model, config.plain_ends)
    excluded, others, attentions = 0, 0, set[str]()
    adapters = set() if config.adapters else _adapters(model)
    for name, module in list(model.named_modules()):
        kind = None if module in adapters else quantized_class(module)
        if kind is OutProjection and name.rpartition(".")[0] not in attentions:
            continue  # that of an attention which is left: never called
        if kind is not None:
            own = matrices(module)
            if pattern is not None and pattern.search(name):
                excluded += max(1, sum(p.numel() for p in own))
            elif module in ends or any(id(p) in tables for p in own):
                others += sum(p.numel() for p in own)
            else:
                set_class(module, kind)
                attentions |= {name} if kind is MultiheadAttention else set()
        else:
            _switch_off_fused_path(module)
    return excluded, others


def quantized_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that ``convert`` gives a module like this one; None where it leaves it."""
    kind = class_of(module)
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
    return mixed(OwnProducts, kind) if multiplies(module, kind) else None


def quantize_attention(model: nn.Module) -> None:
    """Let the attentions of transformers, and those that call PyTorch's function, take quantized products."""
    inside, modules = set[nn.Module](), list[Any](model.modules())
    for module in modules:
        if not isinstance(module, Quantized) and calls_attention(module, class_of(module)):
            change(module, "class", mixed(OwnAttention, class_of(module)))
        elif hasattr(module, "set_attn_implementation") and module not in inside:
            from dsq.layers.of_transformers import NAME  # needs transformers

            inside |= set(module.modules())  # its setting holds for the models inside it
            change(module, "attention", NAME)


def _adapters(model: nn.Module) -> set[nn.Module]:
    """Return the low-rank layers that PEFT put beside others."""
    tuners: list[Any] = [module for module in model.modules() if hasattr(module, "adapter_layer_names")]
    layers = (getattr(tuner, name, None) for tuner in tuners for name in tuner.adapter_layer_names)
    return {adapter for layer in layers if isinstance(layer, nn.Module) for adapter in layer.modules()}


def _switch_off_fused_path(module: nn.Module) -> None:
    """Let ``module``, which stays of its class, call its linear layers and not read their weights by itself."""
    if isinstance(module, nn.TransformerEncoderLayer):
        change(module, "activation_relu_or_gelu", 0)  # so that it never takes its fused evaluation path
    elif isinstance(module, nn.TransformerEncoder):
        change(module, "use_nested_tensor", False)  # nested tensors are for that path alone
    elif getattr(module, "skip_embed_dim_check", None) is False:
        change(module, "skip_embed_dim_check", True)  # else fairseq's attention hands its weights to PyTorch's function


# ---- what conversion changes of a module besides its products, and what it was before

#: attribute of a module some of whose settings were changed: what they were, by name
_BEFORE = "_dsq_before"
_WHOLE = "_dsq_whole"


def change(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of ``module`` and remember what it was.

    Four names are no attributes: "class", "attention" (the attention function of a model of transformers), "stash"
    (whether what the operations of dsq.stash's table keep is packed; a format where no layer says in which), and
    "whole" (whether the module is a model that was converted, no part of one).
    """
    before = _get(module, name)
    _set(module, name, value)
    module.__dict__.setdefault(_BEFORE, {})[name] = before


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module``, without what fully_shard or a parametrization put before it."""
    fsdp, kind = sys.modules.get("torch.distributed.fsdp"), type(module)
    if fsdp is not None and kind.__bases__[0] is fsdp.FSDPModule:
        return kind.__bases__[1]
    return kind.__bases__[0] if is_parametrized(module) else kind


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give ``module`` another class; one that fully_shard sharded stays so, as do its parametrizations."""
    before = type(module)
    if class_of(module) is before.__bases__[0] and is_parametrized(module):  # its class has the parameters' properties
        own = {name: value for name, value in vars(before).items() if name not in ("__dict__", "__weakref__")}
        kind = type(f"Parametrized{kind.__name__}", (kind,), own)
    elif class_of(module) is not before:  # as fully_shard makes its classes
        kind = type(f"FSDP{kind.__name__}", (before.__bases__[0], kind), {"__deepcopy__": vars(before)["__deepcopy__"]})
    module.__class__ = kind


def _get(module: Any, name: str) -> Any:
    match name:
        case "class":
            return class_of(module)
        case "attention":
            return module.config._attn_implementation
        case "stash":
            policy: Any = applied(module).get("bfp")
            return policy is not None and (policy.q1 or True)
        case "whole":
            return module.__dict__.get(_WHOLE, False)
    return getattr(module, name)


def _set(module: Any, name: str, value: Any) -> None:
    match name:
        case "class":
            set_class(module, value)
        case "attention":
            module.set_attn_implementation(value)
        case "stash" if value:
            policy: Any = stash.apply(module, "bfp")
            policy.q1 = None if value is True else value
        case "stash":
            applied(module)["bfp"].remove(module)  # of a deep copy: the two share the policy
        case "whole" if value:
            module.__dict__[_WHOLE] = value
        case "whole":
            module.__dict__.pop(_WHOLE, None)
        case _:
            setattr(module, name, value)


#: what ``convert`` puts on a layer
FIELDS = ("formats", "eval_full_precision", "conversion", "idle", "small")
