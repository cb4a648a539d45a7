"""Mesa (Pan et al., 2021): the activations of a transformer saved in 8 bits, attention's by head.

    alpha <- lambda alpha + (1 - lambda)(max X - min X)    beta <- lambda beta + (1 - lambda) min X    (equations 6, 7)
    saved: q = clip(round((x - beta) 255 / alpha), 0, 255), rounded stochastically                     (3, 4)
    in the backward: q alpha / 255 + beta                                                               (5)

A group is a head for queries, keys, values and attention maps; elsewhere the channels are cut into as many groups as
there are heads. The ranges are updated in the training forward before its tensors are quantized, and the range used
is saved with the codes. The forward itself is exact. Which tensors an operation saves, its rule says (dsq/stash/rules):
a layer norm its normalized input and the exact deviation, where the paper saves the input; fused attention q, k and v.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dsq.arguments import choice, number, whole_number
from dsq.kernels.backend import AffineCodes, Groups, MovingRanges
from dsq.kernels.dispatch import affine_pack, affine_unpack
from dsq.packing import Rounding
from dsq.stash.controller import Controller
from dsq.stash.interception import RulePolicy
from dsq.stash.memory import MemoryOrder
from dsq.stash.policy import register
from dsq.stash.saved_forms import Encoded
from dsq.stash_bits import MESA_BITS, Role

KINDS = ("matmul", "softmax", "gelu", "layernorm", "conv", "linear", "batchnorm", "other")
#: the kind of operation, and the axis along which groups lie (heads -3, channels), by the role of the saved tensor
_PLACES: dict[Role, tuple[str, int]] = {
    "linear": ("linear", -1),
    "product": ("matmul", -3),
    "convolution": ("conv", 1),
    "softmax": ("softmax", -3),
    "attention": ("matmul", -3),
    "layernorm": ("layernorm", -1),
    "groupnorm": ("other", 1),
    "batchnorm": ("batchnorm", 1),
    "activation": ("gelu", -1),
    "factor": ("other", -1),
    "boundary": ("other", -1),
}
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_DEFAULT_GROUPS = 8  #: of a model in which no module names its heads


@register("mesa", composes_with=("checkpoint",))
def attach(
    model: nn.Module,
    *,
    kinds: Collection[str] = KINDS,
    decay: float = 0.9,
    groups: int | None = None,
    rounding: Rounding = "stochastic",
    seed: int = 0,
) -> Controller:
    """Keep in 8 bits what the operations of `kinds` save while the model's forward runs.

    Args:
        kinds: any of matmul, softmax, gelu, layernorm, conv, linear, batchnorm, other (the paper's table 7 switches
            them on alone). An operation outside of `kinds` saves exact tensors.
        decay: lambda of the running ranges, 0 <= lambda < 1; the first forward copies its ranges.
        groups: heads and channel groups; None: the number of heads that most modules name (num_heads, nhead, ...), or
            8. A tensor with an axis of heads shows them itself.
    Raises:
        ValueError: an option out of range.
    """
    if isinstance(kinds, str) or not isinstance(kinds, Collection) or not kinds:
        raise ValueError(f"kinds must be a sequence of {', '.join(KINDS)}, got {kinds!r}")
    for kind in kinds:
        choice("kinds", kind, KINDS)
    number("decay", decay, least=0, below=1)
    groups = None if groups is None else whole_number("groups", groups, 1)
    choice("rounding", rounding, get_args(Rounding))
    seeded = whole_number("seed", seed) if rounding == "stochastic" else None
    return Mesa(model, frozenset(kinds), groups or _most_named_heads(model), decay, seeded)


def _most_named_heads(model: nn.Module) -> int:
    named = (getattr(module, name, None) for module in model.modules() for name in _HEADS)
    heads = Counter(value for value in named if isinstance(value, int) and value > 0)
    return heads.most_common(1)[0][0] if heads else _DEFAULT_GROUPS


class Mesa(RulePolicy):
    """Running ranges, told apart by their turn in the model's whole forward, and the count of codes made."""

    by_parts = False

    def __init__(self, model: nn.Module, kinds: frozenset[str], heads: int, decay: float, seed: int | None) -> None:
        super().__init__(model)
        self.kinds, self.heads, self.decay, self.seed = kinds, heads, decay, seed
        self.count = 0  #: seeds the rounding, with `seed`; which is None where that is to nearest
        self.alpha_beta: dict[str, Tensor] = {}  #: (2, groups); NaN until a finite tensor was seen

    def codec(self, module: nn.Module) -> "RangeCodec":
        return RangeCodec(self)

    def details(self) -> tuple[str, ...]:
        return (f"8 bits: {', '.join(kind for kind in KINDS if kind in self.kinds)}",)

    def state_dict(self) -> dict[str, Any]:
        return {"ranges": {key: value.clone() for key, value in self.alpha_beta.items()}, "count": self.count}

    def take(self, state: Mapping[str, Any]) -> None:
        self.alpha_beta = {key: value.clone() for key, value in state["ranges"].items()}
        self.count = state["count"]


class RangeCodec:
    """8 bits in groups along an axis, in ranges told apart by the kind of operation, the width and the turn."""

    def __init__(self, mesa: Mesa) -> None:
        self.mesa = mesa
        self.turns: Counter[str] = Counter()

    def encode(self, values: Tensor, order: MemoryOrder, role: Role) -> Encoded | None:
        kind, axis = _PLACES[role]
        if kind not in self.mesa.kinds:
            return None
        groups, width = self._groups(order, axis)
        count, key = values.numel(), f"{kind}:{width}"
        packed = self.pack(key, values.contiguous(), groups)
        return tuple(packed), lambda saved, dtype: affine_unpack(AffineCodes(*saved), MESA_BITS, groups, count, dtype)

    def pack(self, key: str, values: Tensor, groups: Groups) -> AffineCodes:
        """Update the next range of ``key`` by the values, and code them in it."""
        mesa, turn = self.mesa, f"{key}:{self.turns[key]}"
        self.turns[key] += 1
        ranges, dtype = mesa.alpha_beta.get(turn), torch.promote_types(values.dtype, torch.float32)
        if ranges is None or ranges.shape[1] != groups.number:
            ranges = torch.full((2, groups.number), math.nan, dtype=dtype, device=values.device)
        mesa.alpha_beta[turn] = ranges = ranges.to(values.device, dtype)
        seed = None if mesa.seed is None else mesa.seed + mesa.count
        mesa.count += 1
        return affine_pack(values, MESA_BITS, groups, MovingRanges(ranges, mesa.decay), seed)

    def _groups(self, order: MemoryOrder, axis: int) -> tuple[Groups, int]:
        """Return the groups of values in memory order, and the size of the axis along which they lie."""
        dims = len(order.shape)
        by_head = axis == -3 and dims >= 3
        axis = axis % dims if -dims <= axis < dims else dims - 1
        position = order.axes.index(axis)
        size = order.sizes[position]
        # bmm has (batch heads, rows, columns): the batch may vary, its heads do not
        number = size if by_head and dims > 3 else math.gcd(size, self.mesa.heads)
        width = number if by_head else size
        return Groups(width // number * math.prod(order.sizes[position + 1 :]), number), width
