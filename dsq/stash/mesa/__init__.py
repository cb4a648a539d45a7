"""Mesa (Pan et al., 2021): every activation of a transformer kept in 8 bits, attention's by head.

    alpha <- lambda alpha + (1 - lambda)(max X - min X)    beta <- lambda beta + (1 - lambda) min X    (equations 6, 7)
    kept: q = clip(round((x - beta) 255 / alpha), 0, 255), rounded stochastically                      (3, 4)
    in the backward: q alpha / 255 + beta                                                               (5)

A group is a head for queries, keys, values and attention maps; elsewhere the channels are cut into as many groups as
there are heads. The ranges are updated in the training forward before its tensors are quantised, and the range used
is kept with the codes. The forward itself is exact.

A TorchFunctionMode names the operation that runs, saved-tensor hooks quantise what it saves. What autograd saves is
what the paper keeps: softmax its output, layer norm its input beside the exact mean and deviation, GELU its input;
one code serves all consumers of a tensor (softmax and the product with V; q, k and v's linears). Fused attention
(scaled_dot_product_attention without dropout) keeps q, k, v and its output in 8 bits, and the exact logsumexp of its
rows: there is no attention map, and the backward computes it again tile by tile. multi_head_attention_forward runs its
own body, so that its parts can be seen.

Beyond the paper, the channel groups serve every other operation of the forward (products, SiLU, group norm, ...). Masks
of the ReLU family and of dropout take one bit, exact; max-pool's indices their narrowest integers; average pooling
nothing. Tensors that need no gradient and are only multiplied with stay exact, as do 1/std of an RMS norm that is
written out and the log-probabilities of a cross entropy inside the model.
"""

from collections.abc import Collection
from typing import get_args

from torch import nn

from dsq.arguments import choice, number, whole_number
from dsq.packing import Rounding
from dsq.stash.compiled import compiled_blocks
from dsq.stash.controller import Controller
from dsq.stash.mesa.controller import Mesa
from dsq.stash.mesa.observed_forward import OPERATIONS
from dsq.stash.mesa.running_ranges import RunningRanges
from dsq.stash.policy import register
from dsq.stash.saved_tensors.compiled_graphs.blocks import around_compiled_blocks
from dsq.stash.saved_tensors.hooks import around_forward


@register("mesa", composes_with=("checkpoint",), compiled="model")
def attach(
    model: nn.Module,
    *,
    kinds: Collection[str] = tuple(OPERATIONS),
    decay: float = 0.9,
    groups: int | None = None,
    rounding: Rounding = "stochastic",
    seed: int = 0,
) -> Controller:
    """Keep in 8 bits what the operations of `kinds` save while the model's forward runs.

    Args:
        kinds: any of matmul, softmax, gelu, layernorm, conv, linear, batchnorm, other (the paper's table 7 switches
            them on alone). An operation outside of `kinds` keeps what it saves exact.
        decay: lambda of the running ranges, 0 <= lambda < 1; the first forward copies its ranges.
        groups: heads and channel groups; None: the number of heads that the module around an operation names
            (num_heads, nhead, ...), or the model's most frequent one, or 8. A tensor with an axis of heads shows them
            itself.
    Raises:
        ValueError: an option out of range; fewer kinds than all, and compiled blocks, whose graphs do not tell them.
    """
    if isinstance(kinds, str) or not isinstance(kinds, Collection) or not kinds:
        raise ValueError(f"kinds must be a sequence of {', '.join(OPERATIONS)}, got {kinds!r}")
    for kind in kinds:
        choice("kinds", kind, OPERATIONS)
    if set(kinds) != OPERATIONS.keys() and next(compiled_blocks(model), None):
        raise ValueError(f"kinds must be all of {', '.join(OPERATIONS)} over compiled blocks, got {kinds!r}")
    number("decay", decay, least=0, below=1)
    groups = None if groups is None else whole_number("groups", groups, 1)
    choice("rounding", rounding, get_args(Rounding))
    ranges = RunningRanges(decay, rounding, whole_number("seed", seed))
    controller = Mesa(model, frozenset(kinds), ranges, groups)
    around_forward(controller, model, controller.context)
    around_compiled_blocks(controller, model)
    return controller
