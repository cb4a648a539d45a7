"""Compiled models whose graphs pack what they save: ``dsq.compile``, and the options of torch.compile behind it.

    dsq.DynamicPrecision(model)
    dsq.compile(model)                                                    # its blocks, by one graph
    torch.compile(model, options=dsq.inductor_options(model))             # or by a call of torch.compile

Outside of graphs the policy packs as before, also where the compiler gives a frame back to eager mode.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from types import FunctionType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import nn
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from dsq.arguments import number
from dsq.first_training import decide_to_save
from dsq.layers.blocks import block_lists, class_before_policies
from dsq.layers.experts_and_patches import Experts
from dsq.layers.own_products import Products
from dsq.quantizers import Quantized
from dsq.stash.controller import RUNNING, acting_on, applied
from dsq.stash.interception import Interception

Model = TypeVar("Model", bound=nn.Module)

#: of Inductor, beside the partitioner: with its own limits it would write the float32 copy of a value to memory between
#: the value's maker and its codes
_FUSION = {"realize_opcount_threshold": 200, "realize_reads_threshold": 8}


def inductor_options(
    model: nn.Module, recomputed_products: float = 0.0, memory_budget: float | None = None
) -> dict[str, Any]:
    """Return ``options`` of torch.compile with which the graphs of ``model`` pack what they save for the backward.

    From then on the model's policy leaves packing in graphs to these options. A graph saves every tensor in the bits
    that the policy gives to norms and attention, q1 + 2 and at most 8; it saves them exact where q1 is over 8.

    Args:
        model: under ``stash="all"``, or ``dsq.stash.apply(model, "bfp")``.
        recomputed_products: 0 to 1, the share of the products of normalized values (fc1, then q, k and v) whose
            result is computed again in the backward, largest first.
        memory_budget: 0 to 1, the share of the bytes, which the compiled model would save without dsq, that a graph may
            save; ``recomputed_products`` is then the least share that meets it, of each graph.
    Raises:
        TypeError: model is no nn.Module. ValueError: it is under no such policy; a share out of range, or both; at the
            first call, a budget that no share meets.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    policy, module = _policy(model)
    share = number("recomputed_products", recomputed_products, least=0, most=1)
    budget = None if memory_budget is None else number("memory_budget", memory_budget, least=0, most=1)
    if budget is not None and share:
        raise ValueError("recomputed_products must be absent beside memory_budget, which chooses it")
    from dsq.stash.graphs.partitioner import PackedPartitioner  # imports Inductor, which takes seconds

    partitioner = PackedPartitioner(_Bits(ref(policy), ref(module)), share, budget)
    if policy.partitioner is None or policy.partitioner.options != partitioner.options:
        policy.partitioner = partitioner
    for layer in model.modules():
        if isinstance(layer, Quantized):
            layer.graph_packs = True
    return {"custom_partitioner_fn": policy.partitioner} | _FUSION


def compile(
    model: Model, recomputed_products: float = 0.0, memory_budget: float | None = None, **options: Any
) -> Model:
    """Compile the repeated blocks of ``model``, in place, with ``inductor_options``; return the model.

    Blocks are the members of one class, two or more, of an nn.ModuleList or nn.Sequential, that are made of modules
    themselves; equal ones share a graph. A model without such blocks is compiled as a whole.

    Args:
        model, recomputed_products, memory_budget: as in ``inductor_options``.
        options: further arguments of torch.compile, as ``dynamic=True``; a block is one graph unless it has
            converted experts or fullgraph=False.
    Raises:
        TypeError, ValueError: as ``inductor_options`` does. RuntimeError, at the first call, if a block's graph breaks.
    """
    mode = options.pop("mode", None)  # which torch.compile takes in place of options
    inductor = {} if mode is None else torch._inductor.list_mode_options(mode, options.get("dynamic"))
    inductor |= inductor_options(model, recomputed_products, memory_budget) | options.pop("options", {})
    names = {module: name for name, module in model.named_modules()}
    for block in list(chain.from_iterable(block_lists(model))) or [model]:
        # Inductor fails on the numbers of tokens of experts, which depend on data
        fullgraph = not any(isinstance(module, Experts) for module in block.modules())
        arguments = {"fullgraph": fullgraph, "options": inductor, **options}
        compiled: Callable[..., Any]
        sharded = hasattr(block, "unshard")  # FSDP's hooks are not to be traced
        if block.forward.__module__.startswith("torch.nn.") and not sharded:
            compiled = partial(torch.compile(_frame_of(class_before_policies(block)), **arguments), block)
        else:
            compiled = torch.compile(block._call_impl, **arguments)  # as block.compile does
        first = next((module for module in block.modules() if isinstance(module, Quantized)), None)
        block._compiled_call_impl = partial(_call, names[block], first, compiled)
    return model


@cache
def _frame_of(block_class: type) -> Callable[..., Any]:
    """Return a function (block, *args, **kwargs) that calls a block. A compiler traces its frame, and skips the forward
    of torch.nn's own classes. It counts graphs by a function's code, of which each class has its own."""

    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return block._call_impl(*args, **kwargs)

    return FunctionType(call.__code__.replace(), globals(), f"call_{block_class.__name__}")


def _call(name: str, layer: nn.Module | None, compiled: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled block; RuntimeError in a line where its graph breaks. ``layer``: its first converted one."""
    mode: Any = _get_current_function_mode()
    if isinstance(mode, Products):  # of a model around it, until it turns out to be idle: a graph has guards on modes
        with _pop_mode_temporarily():
            return _call(name, layer, compiled, *args, **kwargs)
    if layer is not None and isinstance(mode, Interception):
        decide_to_save(layer)
        # a graph has a guard on it, and a layer may have decided it since the forward began
        mode.level = mode.policy.level(RUNNING.entered[mode.policy])
    try:
        return compiled(*args, **kwargs)
    except torch._dynamo.exc.TorchDynamoException as error:
        inner = getattr(error, "inner_exception", error)
        if str(inner).startswith("memory_budget"):
            raise ValueError(str(inner)) from None
        if isinstance(error, torch._dynamo.exc.Unsupported):
            reason = str(error).strip().partition("\n")[0]
        elif "data-dependent" in str(inner):
            reason = "a shape in it depends on data, as the number of an expert's tokens"
        else:
            raise
        way = "dsq.compile(model, fullgraph=False) packs in each of its graphs"
        raise RuntimeError(f"the graph of block {name or 'model'!r} breaks: {reason}; {way}") from None


def _policy(model: nn.Module) -> tuple[Any, nn.Module]:
    """Return the policy bfp of a model, of one that it wraps as DistributedDataParallel does, or of one that it is a
    part of; and the module whose level counts."""
    for module in model.modules():
        if "bfp" in applied(module):
            return applied(module)["bfp"], module
    for policy in acting_on(model):
        if policy.name == "bfp":
            return policy, model
    first = 'dsq.DynamicPrecision(model, stash="all") or dsq.stash.apply(model, "bfp")'
    raise ValueError(f"model must be under a stash policy before it is compiled: call {first} first")


@dataclass(frozen=True)
class _Bits:
    """The bits in which graphs of a module pack when they are compiled; 0 once its policy is gone."""

    policy: ref[Any]
    module: ref[nn.Module]

    def __call__(self) -> int:
        policy: Any = self.policy()
        active = policy is not None and applied(policy.model).get("bfp") is policy
        return int(policy.graph_bits(self.module())) if active else 0
