"""One forward under mesa: a function mode names the operation that runs, a pack hook quantises what it saves."""

import math
from collections import Counter
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from dsq.kernels.backend import Groups
from dsq.stash.mesa.in_graphs import RangesInGraphs, grouped_axis
from dsq.stash.mesa.running_modules import RunningModules
from dsq.stash.mesa.running_ranges import RunningRanges
from dsq.stash.saved_tensors.affine import AffineGroups
from dsq.stash.saved_tensors.forms import Saved
from dsq.stash.saved_tensors.forward_stash import ForwardStash
from dsq.stash.saved_tensors.memory_order import MemoryOrder
from dsq.stash.saved_tensors.multi_head_forward import multi_head_attention_forward
from dsq.stash.saved_tensors.rules.few_bits import FEW_BITS, SENSITIVE
from dsq.stash.saved_tensors.rules.function_mode import Rules
from dsq.stash.saved_tensors.storages import storages_of

#: function names of each kind of operation; batch norm is not named in the paper
OPERATIONS: dict[str, tuple[str, ...]] = {
    "matmul": ("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"),
    "softmax": ("softmax",),
    "gelu": ("gelu",),
    "layernorm": ("layer_norm",),
    "conv": tuple(f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3)),
    "linear": ("linear", "addmm"),
    "batchnorm": ("batch_norm",),
    "other": (),  # every other function: products, SiLU, group norm, ...
}
_KIND_OF = {name: kind for kind, names in OPERATIONS.items() for name in names}
_EXACT = frozenset(SENSITIVE)
#: nodes that put channels on axis 1, and those that leave axes where they are
_CHANNELS_FIRST = ("Convolution", "NativeBatchNorm", "CudnnBatchNorm", "NativeGroupNorm")
_ELEMENTWISE = ("Add", "Mul", "Silu", "Gelu", "Relu", "MaskedRelu", "Sigmoid", "Hardswish", "MaxPool", "AvgPool")


class ObservedForward(Rules):
    """One forward: which operation is running, and how many stashes each module has made."""

    def __init__(
        self, kinds: frozenset[str], ranges: RunningRanges, running: RunningModules, weights: set[int]
    ) -> None:
        self.kinds, self.ranges, self.running = kinds, ranges, running
        self.stash = ForwardStash(self.encode, weights, set(), RangesInGraphs(running.default_groups))
        super().__init__(FEW_BITS, self.stash.pack_by_rule, self.stash.note_call)
        self.kind: str | None = None  #: None: outside of ``kinds``, or of a compiled graph, which tells no operations
        self.args: tuple[Any, ...] = ()  #: of the operation that runs
        self.made: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            with self:
                return multi_head_attention_forward(*args, **(kwargs or {}))
        kind = None if func in _EXACT else _KIND_OF.get(getattr(func, "__name__", ""), "other")
        self.kind, self.args = kind if kind in self.kinds else None, args
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            self.kind, self.args = None, ()

    def pack(self, tensor: Tensor) -> Saved:
        if self.kind is None:
            return self.stash.keep(tensor)
        if not tensor.requires_grad:  # of other operations, tables and masks stay exact
            self.stash.batch = storages_of(self._operands()) if self.kind != "other" else set()
        return self.stash.pack(tensor)

    def _operands(self) -> list[Tensor]:
        """Of the operation that runs."""
        return [x for x in self.args[:3] if isinstance(x, Tensor)]  # a fourth is attention's mask

    def encode(self, tensor: Tensor, order: MemoryOrder, values: Tensor) -> AffineGroups | None:
        key = self._key(self.running.path())  # an empty tensor's too: those after it keep theirs
        if tensor.dim() == 0 or values.numel() == 0:
            return None
        seen = self.ranges.groups.get(key)
        if seen is None or seen[0] != (order, self.kind):
            seen = self.ranges.groups[key] = (order, self.kind), self._groups(tensor, order)
        return self.ranges.pack(key, values, seen[1])

    def _groups(self, tensor: Tensor, order: MemoryOrder) -> Groups:
        """Of the values of a saved tensor in memory order."""
        axis, (outer, groups, inner) = self._grouping(tensor)
        position = order.axes.index(axis)
        if order.sizes[position] != outer * groups * inner:  # an expanded axis: its one row is one group
            groups, inner = order.sizes[position], 1
        return Groups(inner * math.prod(order.sizes[position + 1 :]), groups)

    def code(self, name: str, values: Tensor, groups: Groups) -> AffineGroups:
        """What a compiled graph saves under that name."""
        return self.ranges.pack(self._key(f"{self.running.path()}:{name}"), values, groups)

    def _key(self, name: str) -> str:
        turn = self.made[name]
        self.made[name] += 1
        return f"{name}:{turn}"

    def _grouping(self, tensor: Tensor) -> tuple[int, tuple[int, int, int]]:
        """(axis, its sizes as outer x groups x inner): where the groups of a saved tensor lie."""
        if self.kind in ("matmul", "softmax") and tensor.dim() >= 3:
            axis = tensor.dim() - 3
            shown = self._operands()[:1]
            heads = shown[0].shape[-3] if shown and shown[0].dim() >= 4 else self.running.heads()
            if tensor.dim() >= 4:
                return axis, (1, tensor.shape[axis], 1)
            if tensor.shape[axis] % heads == 0:  # (batch heads, rows, columns), as bmm has it
                return axis, (tensor.shape[axis] // heads, heads, 1)
        axis = tensor.dim() - 1
        if self.kind is None:
            axis = grouped_axis(tensor.shape, self.running.heads())
        if self.kind in ("conv", "batchnorm") or _made_by_conv(tensor):
            axis = 1
        groups = math.gcd(tensor.shape[axis], self.running.heads())
        return axis, (1, groups, tensor.shape[axis] // groups)


def _made_by_conv(tensor: Tensor) -> bool:
    """Whether channels are axis 1, as a convolution or its norm leaves them."""
    node = tensor.grad_fn
    while node is not None and node.name().startswith(_ELEMENTWISE):
        node = node.next_functions[-1][0]  # of a sum the branch: the first would be the residual stream
    return node is not None and node.name().startswith(_CHANNELS_FIRST)
