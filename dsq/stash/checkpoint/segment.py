"""One segment: its forward without a graph, and again with one in the backward."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dsq.stash.checkpoint.controller import SegmentCount
from dsq.stash.codes import exact_form, keep, kept
from dsq.stash.hooks import refuse_create_graph
from dsq.stash.interception import BOUNDARY, ForwardPolicy, again, entered_now, form_now


def checkpointed(count: SegmentCount, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a segment (a partial of this, which is copied with its module)."""
    tensors, rest, spec = _without_tensors((args, kwargs))
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not (parameters or any(t.requires_grad for t in tensors)):
        return type(module).forward(module, *args, **kwargs)
    _check_no_cache(module, (*args, *kwargs.values()))
    segment = _Segment(module, rest, spec, entered_now(), _Ambient.now(tensors))
    count.note(tensors, segment.ambient.nbytes)
    outputs = _Checkpoint.apply(segment, len(tensors), *tensors, *parameters)  # type: ignore[no-untyped-call]
    return _with_tensors(outputs, segment.output_rest, segment.output_spec)


def _check_no_cache(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    """RuntimeError for keys and values of transformers that a segment adds to: the recomputation would add again."""
    cache = next((a for a in arguments if hasattr(type(a), "get_seq_length")), None)
    if cache is not None:
        raise RuntimeError(
            f"a checkpointed segment ({type(module).__name__}) was given a {type(cache).__name__}, which it would fill "
            "again when it is recomputed; call the model with use_cache=False"
        )


_TENSOR = object()  #: stands for a tensor among the leaves of a tree


def _without_tensors(tree: Any) -> tuple[list[Tensor], list[Any], TreeSpec]:
    """The tensors of a tree, its leaves without them, and its shape."""
    leaves, spec = tree_flatten(tree)
    rest = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], rest, spec


def _with_tensors(tensors: Iterable[Tensor], rest: list[Any], spec: TreeSpec) -> Any:
    """The tree again."""
    remaining = iter(tensors)
    return tree_unflatten([next(remaining) if leaf is _TENSOR else leaf for leaf in rest], spec)


@dataclass(frozen=True)
class _Ambient:
    """Random state and autocast of the forward."""

    random: Tensor
    device_random: tuple[tuple[torch.device, Tensor], ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @classmethod
    def now(cls, tensors: list[Tensor]) -> Self:
        devices = sorted({t.device for t in tensors if t.device.type == "cuda"}, key=str)
        kinds = sorted({"cpu", *(t.device.type for t in tensors)} - {"meta"})
        return cls(
            torch.get_rng_state(),
            tuple((device, torch.cuda.get_rng_state(device)) for device in devices),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            torch.is_autocast_cache_enabled(),
        )

    @property
    def nbytes(self) -> int:
        """Of the random states."""
        return self.random.nbytes + sum(state.nbytes for _, state in self.device_random)

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same random numbers and casts; the generators are put back afterwards."""
        devices = [device for device, _ in self.device_random]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))
            torch.set_rng_state(self.random)
            for device, state in self.device_random:
                torch.cuda.set_rng_state(state, device)
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache))
            yield


@dataclass(eq=False)
class _Segment:
    """One call of a segment, without its tensors."""

    module: nn.Module
    rest: list[Any]  #: of the arguments
    spec: TreeSpec
    policies: tuple[tuple[ForwardPolicy, nn.Module], ...]  #: and the models in whose forward they were
    ambient: _Ambient
    output_rest: Any = None
    output_spec: Any = None

    def call(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Run the module's own forward on these tensors."""
        args, kwargs = _with_tensors(tensors, self.rest, self.spec)
        output = type(self.module).forward(self.module, *args, **kwargs)
        outputs, self.output_rest, self.output_spec = _without_tensors(output)
        return tuple(outputs)

    def recompute(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """The outputs again, with their graph; buffers (batch norm's) keep the state they have."""
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        buffers_aside = _reparametrize_module(self.module, buffers)
        # the copies first: policies ask for the model's buffers when they are entered
        with torch.enable_grad(), self.ambient.again(), buffers_aside, again(self.policies):
            return self.call(tensors)


class _Checkpoint(torch.autograd.Function):
    """The outputs of a segment. Its parameters are inputs too, so that a frozen first input stops no gradient."""

    @staticmethod
    def forward(ctx: Any, segment: _Segment, count: int, *inputs: Tensor) -> Any:
        ctx.segment, ctx.parameters = segment, inputs[count:]
        ctx.wanted = [t.requires_grad for t in inputs[:count]]
        keep(ctx, *(form_now(t, BOUNDARY) if t.requires_grad else exact_form(t) for t in inputs[:count]))
        ctx.set_materialize_grads(False)  # no zeros for an output that nobody used (attention's weights)
        versions = [t._version for t in inputs[:count]]
        outputs = segment.call(inputs[:count])
        if versions != [t._version for t in inputs[:count]]:
            raise RuntimeError(
                f"a checkpointed segment ({type(segment.module).__name__}) modifies its input in place, which its "
                "recomputation needs as it was; choose segments so that none does"
            )
        ctx.mark_non_differentiable(*(t for t in outputs if not (t.is_floating_point() or t.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_create_graph()
        tensors = [t.detach().requires_grad_(w) for t, w in zip(kept(ctx), ctx.wanted, strict=True)]
        outputs = ctx.segment.recompute(tensors)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad and g is not None]
        leaves = [t for t in (*tensors, *ctx.parameters) if t.requires_grad]
        _check_leaves([o for o, _ in pairs], leaves)
        found = iter(torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True))
        return None, None, *(next(found) if t.requires_grad else None for t in (*tensors, *ctx.parameters))


def _check_leaves(outputs: list[Tensor], leaves: list[Tensor]) -> None:
    """RuntimeError where a segment used a tensor that needs a gradient and reached it in no way this file can see."""
    known = {id(t) for t in leaves}
    queue, seen = [o.grad_fn for o in outputs], set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise RuntimeError(
                f"a checkpointed segment used a tensor of shape {tuple(leaf.shape)} that needs a gradient and is "
                "neither an argument nor a parameter of it; pass it as an argument, or choose segments so that it is"
            )
        queue.extend(child for child, _ in node.next_functions)
