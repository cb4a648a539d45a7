"""Which modules become quantised, and what is switched off in those that stay."""

import re
import sys
from typing import Any

from torch import nn

from dsq.config import DSQConfig
from dsq.conversion.module_settings import change, class_of, set_class
from dsq.layers.experts import Experts, is_experts
from dsq.layers.mixed import mixed
from dsq.layers.multihead import MultiheadAttention, OutProjection
from dsq.layers.own_attention import OwnAttention, calls_attention
from dsq.layers.patches import PatchConv2d, cuts_patches
from dsq.layers.unquantised import embedded, matrices
from dsq.linear import Linear

#: quantised classes by the plain ones whose place they take
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {it.plain: it for it in (Linear, MultiheadAttention, OutProjection)}


def change_classes(model: nn.Module, config: DSQConfig) -> tuple[int, int]:
    """Give the layers of ``model`` their quantised classes, and switch off what would read their weights past them.

    Returns how many values the matrices hold that ``config.exclude`` left out, and how many those that are an
    embedding's too.
    """
    pattern = None if config.exclude is None else re.compile(config.exclude)
    tables = set() if config.tied else embedded(model)
    excluded, tied, attentions = 0, 0, set[str]()
    adapters = set() if config.adapters else _adapters(model)
    for name, module in list(model.named_modules()):
        kind = None if module in adapters else quantised_class(module)
        if kind is OutProjection and name.rpartition(".")[0] not in attentions:
            continue  # that of an attention which is left: never called
        if kind is not None:
            own = matrices(module)
            if pattern is not None and pattern.search(name):
                excluded += max(1, sum(p.numel() for p in own))
            elif any(id(p) in tables for p in own):
                tied += sum(p.numel() for p in own)
            else:
                set_class(module, kind)
                attentions |= {name} if kind is MultiheadAttention else set()
        else:
            _switch_off_fused_path(module)
    return excluded, tied


def quantised_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that ``convert`` gives a module of its kind; None where it leaves it."""
    kind = class_of(module)
    if kind in _CLASSES:
        return _CLASSES[kind]
    if kind is nn.Conv2d and cuts_patches(module):
        return PatchConv2d
    if is_experts(module):
        return mixed(Experts, kind)
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None and kind is transformers.Conv1D:
        from dsq.layers.conv1d import Conv1D  # needs transformers

        return Conv1D
    return None


def quantise_attention(model: nn.Module) -> None:
    """Let the attentions of torch and of transformers take quantised products."""
    inside, modules = set[nn.Module](), list[Any](model.modules())
    for module in modules:
        if isinstance(module, MultiheadAttention):
            module.quantised_products = True
        elif calls_attention(module, class_of(module)):
            change(module, "class", mixed(OwnAttention, class_of(module)))
        elif hasattr(module, "set_attn_implementation") and module not in inside:
            from dsq.layers.attention_interface import NAME  # needs transformers

            inside |= set(module.modules())  # its setting holds for the models inside it
            change(module, "attention", NAME)


def _adapters(model: nn.Module) -> set[nn.Module]:
    """The low-rank layers that PEFT put beside others."""
    tuners: list[Any] = [module for module in model.modules() if hasattr(module, "adapter_layer_names")]
    return {
        adapter
        for tuner in tuners
        for name in tuner.adapter_layer_names
        if isinstance(layers := getattr(tuner, name, None), nn.Module)
        for adapter in layers.modules()
    }


def _switch_off_fused_path(module: nn.Module) -> None:
    """Let ``module``, which stays of its class, call its linear layers and not read their weights by itself."""
    if isinstance(module, nn.TransformerEncoderLayer):
        change(module, "activation_relu_or_gelu", 0)  # so that it never takes its fused evaluation path
    elif isinstance(module, nn.TransformerEncoder):
        change(module, "use_nested_tensor", False)  # nested tensors are for that path alone
    elif getattr(module, "skip_embed_dim_check", None) is False:
        change(module, "skip_embed_dim_check", True)  # else fairseq's attention hands its weights to PyTorch's function
