"""One forward under mesa: a function mode names the operation that runs, a pack hook quantises what it saves."""

import math
from collections import Counter
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from dsq.stash.mesa.running_modules import RunningModules
from dsq.stash.mesa.running_ranges import HeadCodes, RunningRanges
from dsq.stash.saved_tensors.attention import own_body, scaled_dot_product_attention
from dsq.stash.saved_tensors.forms import Saved
from dsq.stash.saved_tensors.forward_stash import ForwardStash
from dsq.stash.saved_tensors.hooks import rules_may_act
from dsq.stash.saved_tensors.storages import storages_of

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


class ObservedForward(TorchFunctionMode):
    """One forward: which operation is running, and how many stashes each module has made."""

    def __init__(
        self, kinds: frozenset[str], ranges: RunningRanges, running: RunningModules, weights: set[int]
    ) -> None:
        super().__init__()
        self.kinds, self.ranges, self.running = kinds, ranges, running
        self.stash = ForwardStash(self.encode, weights, set())
        self.kind: str | None = None
        self.heads: int | None = None  #: where the running call's operands show them
        self.made: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        self.stash.note_call(func, kwargs)
        if name == "multi_head_attention_forward":
            with self:
                return own_body(func)(*args, **kwargs)
        watched = {"matmul", "softmax"} & self.kinds and rules_may_act()
        if name == "scaled_dot_product_attention" and watched:
            with self:
                return scaled_dot_product_attention(*args, **kwargs)
        kind = _KIND_OF.get(name)
        self.kind = kind if kind in self.kinds else None
        operands = [x for x in args if isinstance(x, Tensor)]
        shown = kind in ("matmul", "softmax") and operands and operands[0].dim() >= 4
        self.heads = operands[0].shape[-3] if shown else None
        self.stash.batch = storages_of(operands)
        try:
            return func(*args, **kwargs)
        finally:
            self.kind = None

    def pack(self, tensor: Tensor) -> Saved:
        if self.kind is None:
            return self.stash.keep(tensor)
        if self.kind == "relu":
            return self.stash.keep_sign(tensor)
        return self.stash.pack(tensor)

    def encode(self, tensor: Tensor, order: Any, values: Tensor) -> HeadCodes | None:
        path = self.running.path()
        key = f"{path}:{self.made[path]}"
        self.made[path] += 1  # an empty tensor's too: those after it keep theirs
        if values.numel() == 0:
            return None
        axis, (outer, groups, inner) = self._grouping(tensor)
        position = order.axes.index(axis)
        if values.shape[position] != outer * groups * inner:  # an expanded axis: its one row is one group
            outer, groups, inner = 1, values.shape[position], 1
        values = values.unflatten(position, (outer, groups, inner))
        return self.ranges.quantize(key, values, position + 1)

    def _grouping(self, tensor: Tensor) -> tuple[int, tuple[int, int, int]]:
        """(axis, its sizes as outer x groups x inner): where the groups of a saved tensor lie."""
        if self.kind in ("matmul", "softmax") and tensor.dim() >= 3:
            axis = tensor.dim() - 3
            heads = self.heads or self.running.heads()
            if tensor.dim() >= 4:
                return axis, (1, tensor.shape[axis], 1)
            if tensor.shape[axis] % heads == 0:  # (batch heads, rows, columns), as bmm has it
                return axis, (tensor.shape[axis] // heads, heads, 1)
        axis = 1 if self.kind in ("conv", "batchnorm") or _made_by_conv(tensor) else tensor.dim() - 1
        groups = math.gcd(tensor.shape[axis], self.running.heads())
        return axis, (1, groups, tensor.shape[axis] // groups)


def _made_by_conv(tensor: Tensor) -> bool:
    """Whether channels are axis 1, as a convolution or batch norm leaves them."""
    name = tensor.grad_fn.name() if tensor.grad_fn is not None else ""
    return name.startswith(("Convolution", "NativeBatchNorm", "CudnnBatchNorm"))
