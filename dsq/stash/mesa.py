"""Mesa (Pan et al., 2021): every activation of a transformer kept in 8 bits, attention's by head.

    alpha <- lambda alpha + (1 - lambda)(max X - min X)    beta <- lambda beta + (1 - lambda) min X    (equations 6, 7)
    kept: q = clip(round((x - beta) 255 / alpha), 0, 255), rounded stochastically                      (3, 4)
    in the backward: q alpha / 255 + beta                                                               (5)

A group is a head for queries, keys, values and attention maps; elsewhere the channels are cut into as many groups as
there are heads. The ranges are updated in the training forward before its tensors are quantised, and the range used
is kept with the codes. The forward itself is exact.

A TorchFunctionMode names the operation that runs, saved-tensor hooks quantise what it saves. What autograd saves is
what the paper keeps: softmax its output, layer norm its input beside the exact mean and deviation, GELU its input;
one code serves all consumers of a tensor (softmax and the product with V; q, k and v's linears). Two calls are taken
apart so that their parts can be seen: scaled_dot_product_attention becomes matmul, softmax, matmul, and so keeps its
attention map, as the paper's models do; multi_head_attention_forward runs its own body.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from dsq.arguments import whole_number
from dsq.stash.affine import ROUNDINGS, Noise, decode, encode
from dsq.stash.attention import own_body, scaled_dot_product_attention
from dsq.stash.forward_stash import ForwardStash, Packed, storages_of
from dsq.stash.hooks import around_forward, get, parameter_storages, rules_may_act
from dsq.stash.policy import Controller, Summary, check_keys, register

#: function names of each kind of operation; dropout (masks, 1 bit and exact) and batch norm are not named in the paper
OPERATIONS: dict[str, tuple[str, ...]] = {
    "matmul": ("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"),
    "softmax": ("softmax",),
    "gelu": ("gelu",),
    "layernorm": ("layer_norm",),
    "relu": ("relu", "relu_"),
    "conv": tuple(f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3)),
    "linear": ("linear",),
    "dropout": ("dropout",),
    "batchnorm": ("batch_norm",),
}
_KIND_OF = {name: kind for kind, names in OPERATIONS.items() for name in names}
_HEAD_ATTRIBUTES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_DEFAULT_GROUPS = 8  #: of a model in which no module names its heads


@register("mesa", composes_with=("checkpoint",))
def attach(
    model: nn.Module,
    *,
    kinds: Collection[str] = tuple(OPERATIONS),
    decay: float = 0.9,
    groups: int | None = None,
    rounding: str = "stochastic",
    seed: int = 0,
) -> Controller:
    """Keep in 8 bits what the operations of `kinds` save while the model's forward runs.

    Args:
        kinds: any of matmul, softmax, gelu, layernorm, relu, conv, linear, dropout, batchnorm (the paper's table 7
            switches them on alone). An operation outside of `kinds` keeps what it saves exact.
        decay: lambda of the running ranges, 0 <= lambda < 1; the first forward copies its ranges.
        groups: heads and channel groups; None: the number of heads that the module around an operation names
            (num_heads, nhead, ...), or the model's most frequent one, or 8. A tensor with an axis of heads shows them
            itself.
    Raises:
        ValueError: an option out of range.
    """
    several = isinstance(kinds, Collection) and not isinstance(kinds, str) and len(kinds) > 0
    if not several or any(kind not in tuple(OPERATIONS) for kind in kinds):
        raise ValueError(f"kinds={kinds!r}: accepted is a sequence of {', '.join(OPERATIONS)}")
    if not isinstance(decay, (int, float)) or not 0 <= decay < 1:
        raise ValueError(f"decay={decay!r}: accepted is 0 <= decay < 1")
    if groups is not None:
        groups = whole_number("groups", groups, 1)
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r}: accepted are {', '.join(ROUNDINGS)}")
    controller = Mesa(model, frozenset(kinds), decay, groups, rounding, whole_number("seed", seed))
    for name, module in model.named_modules():
        controller.follow(name, module)
    around_forward(controller, model, controller.forward)
    return controller


@dataclass(frozen=True)
class HeadCodes:
    """8-bit codes beside the range they were made with (not the running one: a later forward moves that)."""

    codes: Tensor
    low: Tensor
    step: Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.low.nbytes + self.step.nbytes

    def unpack(self, dtype: torch.dtype) -> Tensor:
        return decode(self.codes, self.low, self.step, dtype)


class Mesa(Controller):
    """Running ranges, by module path and order within it, and the count of stashes that seeds the rounding."""

    def __init__(
        self, model: nn.Module, kinds: frozenset[str], decay: float, groups: int | None, rounding: str, seed: int
    ) -> None:
        super().__init__(model)
        self.kinds, self.decay, self.groups, self.rounding, self.seed = kinds, decay, groups, rounding, seed
        self.ranges: dict[str, Tensor] = {}  #: (2, groups): alpha and beta; NaN until a finite tensor was seen
        self.count = 0
        self.modules: list[tuple[str, nn.Module]] = [("", model)]  #: those running, outermost first
        named = Counter(heads for module in model.modules() if (heads := _heads_of(module)))
        self.default_groups = groups or (named.most_common(1)[0][0] if named else _DEFAULT_GROUPS)
        self.latest: ForwardStash | None = None

    def follow(self, name: str, module: nn.Module) -> None:
        """Keep `modules` up to date while this module runs."""

        def enter(*_: Any) -> None:
            self.modules.append((name, module))

        def leave(*_: Any) -> None:
            self.modules.pop()

        self.undo.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        self.undo.callback(module.register_forward_hook(leave, always_call=True).remove)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """What is entered around the model's forward."""
        run = _Run(self)
        self.latest = run.stash
        with saved_tensors_hooks(run.pack, get), run:
            yield

    def heads(self) -> int:
        """Groups of the innermost running module that names its heads."""
        if self.groups:
            return self.groups
        named = (heads for _, module in reversed(self.modules) if (heads := _heads_of(module)))
        return next(named, self.default_groups)

    def ranges_now(self, key: str, values: Tensor, group_axis: int) -> tuple[Tensor, Tensor]:
        """Update the running range of `key` by `values` and return (low, step), shaped to broadcast against them."""
        others = tuple(axis for axis in range(values.dim()) if axis != group_axis)
        wide = torch.promote_types(values.dtype, torch.float32)
        low, high = values.amin(others).to(wide), values.amax(others).to(wide)
        now = torch.stack([high - low, low])
        before = self.ranges.get(key)
        before = torch.full_like(now, math.nan) if before is None else before.to(now)
        merged = torch.where(before.isnan(), now, self.decay * before + (1 - self.decay) * now)
        # an overflow (loss scaling meets them) must show in this gradient and leave the estimate as it was
        finite = now.isfinite().all(0)
        self.ranges[key] = torch.where(finite, merged, before)
        alpha, beta = torch.where(finite, merged, math.nan)
        shape = [-1 if axis == group_axis else 1 for axis in range(values.dim())]
        return beta.view(shape), (alpha / 255).view(shape)

    def report(self) -> Summary:
        raw, kept = (self.latest.raw_bytes, self.latest.kept_bytes) if self.latest else (0, 0)
        return Summary(self.name, (), raw, kept, (f"8 bits: {', '.join(k for k in OPERATIONS if k in self.kinds)}",))

    def state_dict(self) -> dict[str, Any]:
        return {"ranges": {key: value.clone() for key, value in self.ranges.items()}, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(self.name, state, ("ranges", "count"))
        self.ranges = {key: value.clone() for key, value in state["ranges"].items()}
        self.count = state["count"]


class _Run(TorchFunctionMode):
    """One forward: which operation is running, and how many stashes each module has made."""

    def __init__(self, controller: Mesa) -> None:
        super().__init__()
        self.controller = controller
        self.stash = ForwardStash(self.encode, parameter_storages(controller.model), set())
        self.kind: str | None = None
        self.heads: int | None = None  #: where the running call's operands show them
        self.made: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        self.stash.note_call(func, kwargs)
        if name == "multi_head_attention_forward":
            with self:
                return own_body(func)(*args, **kwargs)
        watched = {"matmul", "softmax"} & self.controller.kinds and rules_may_act()
        if name == "scaled_dot_product_attention" and watched:
            with self:
                return scaled_dot_product_attention(*args, **kwargs)
        kind = _KIND_OF.get(name)
        self.kind = kind if kind in self.controller.kinds else None
        operands = [x for x in args if isinstance(x, Tensor)]
        shown = kind in ("matmul", "softmax") and operands and operands[0].dim() >= 4
        self.heads = operands[0].shape[-3] if shown else None
        self.stash.batch = storages_of(operands)
        try:
            return func(*args, **kwargs)
        finally:
            self.kind = None

    def pack(self, tensor: Tensor) -> Packed:
        if self.kind is None:
            return self.stash.keep(tensor)
        if self.kind == "relu":
            return self.stash.keep_sign(tensor)
        return self.stash.pack(tensor)

    def encode(self, tensor: Tensor, order: Any, values: Tensor) -> HeadCodes | None:
        path = self.controller.modules[-1][0]
        key = f"{path}:{self.made[path]}"
        self.made[path] += 1  # an empty tensor's too: those after it keep theirs
        if values.numel() == 0:
            return None
        axis, (outer, groups, inner) = self._grouping(tensor)
        position = order.axes.index(axis)
        if values.shape[position] != outer * groups * inner:  # an expanded axis: its one row is one group
            outer, groups, inner = 1, values.shape[position], 1
        values = values.unflatten(position, (outer, groups, inner))
        low, step = self.controller.ranges_now(key, values, position + 1)
        noise = Noise(tensor.device, self.controller.rounding, self.controller.seed + self.controller.count)
        self.controller.count += 1
        return HeadCodes(encode(values, low, step, 8, noise), low, step)

    def _grouping(self, tensor: Tensor) -> tuple[int, tuple[int, int, int]]:
        """(axis, its sizes as outer x groups x inner): where the groups of a saved tensor lie."""
        if self.kind in ("matmul", "softmax") and tensor.dim() >= 3:
            axis = tensor.dim() - 3
            heads = self.heads or self.controller.heads()
            if tensor.dim() >= 4:
                return axis, (1, tensor.shape[axis], 1)
            if tensor.shape[axis] % heads == 0:  # (batch heads, rows, columns), as bmm has it
                return axis, (tensor.shape[axis] // heads, heads, 1)
        axis = 1 if self.kind in ("conv", "batchnorm") or _made_by_conv(tensor) else tensor.dim() - 1
        groups = math.gcd(tensor.shape[axis], self.controller.heads())
        return axis, (1, groups, tensor.shape[axis] // groups)


def _heads_of(module: nn.Module) -> int | None:
    for name in _HEAD_ATTRIBUTES:
        value = getattr(module, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _made_by_conv(tensor: Tensor) -> bool:
    """Whether channels are axis 1, as a convolution or batch norm leaves them."""
    name = tensor.grad_fn.name() if tensor.grad_fn is not None else ""
    return name.startswith(("Convolution", "NativeBatchNorm", "CudnnBatchNorm"))
