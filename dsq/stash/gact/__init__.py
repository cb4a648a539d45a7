"""GACT (Liu et al., 2022): any model's saved tensors in few bits, more of them where the gradient is sensitive.

    V(b) = sum_l c_l S(b_l)                 variance that the codes add to the gradient      (equation 5)
    c_l = 0.5 ||g_0 - g_1||^2 / S(b_l)      two gradients, differing in tensor l's seed      (algorithm 1)
    min V(b)  s.t.  sum_l b_l D_l <= B                                                       (equation 4, greedily)

The paper's controller runs the user's closure to get those gradients. Here the loop stays a plain one: the model
inputs, the random state and the gradient at the model's outputs of one step are remembered, and before the next step
the forward is run again, once, with two codes of each tensor, and its backward L + 1 times. That leaves .grad, buffers
and PyTorch's random streams as they were; but the user's hooks on modules, tensors and parameters run again, and what
the forward draws from other random streams (Python's random, NumPy's) is drawn again. It takes about L backwards and
twice the stash, every adapt_interval steps.

What each operation keeps is the table's (dsq/stash/table). Coded tensors are told apart by their order in the forward.
What the loss keeps stays exact: it is the most sensitive there is (section 6.1). The paper's level L2 is PyTorch's
``torch.autograd.graph.save_on_cpu(pin_memory=True)`` around the forward.

Beyond the paper, masks of the ReLU family and of dropout take one bit, exact, on top of the average, and max-pool's
indices their narrowest integers. In the paper a ReLU shares the code of the next layer's input, which rounds small
outputs to zero: at 4 bits the gradient of a ResNet-20 was off by 0.42 of its norm that way, and is by 0.10 with masks.
"""

from typing import Any

from torch import nn

from dsq.arguments import choice, number, whole_number
from dsq.stash.controller import Controller
from dsq.stash.gact.codecs import CODE_FAMILIES
from dsq.stash.gact.controller import Gact
from dsq.stash.gact.plan import BitPlan
from dsq.stash.interception import intercept
from dsq.stash.policy import apply, register

LEVELS = ("L1", "CB1", "CB2")


@register("gact", composes_with=("checkpoint", "selective"))
def attach(
    model: nn.Module,
    *,
    bits: float = 4,
    level: str = "L1",
    format: str = "affine",
    adapt_interval: int | None = 1000,
    seed: int = 0,
) -> Controller:
    """Keep what the table's operations save while the model's forward runs, in `bits` bits a value on average.

    Args:
        bits: B / sum_l D_l of equation 4; scales and minima come on top (0.25 bit; block formats 0.5). Until c_l was
            measured all tensors have the widest code within it.
        level: L1: adaptive bits. CB1: L1 and checkpointing (the policy "checkpoint"; recomputed tensors are coded too,
            uniformly). CB2: CB1 and nn.MultiheadAttention through scaled_dot_product_attention (it then returns no
            weights); attention written in another way has to call that function itself.
        format: affine (GACT's, groups of 256, 1 to 8 bits), or bfp, sbfp or snvint (boxes of 16, 2 to 8 bits).
        adapt_interval: steps between two measurements of c_l, the first after the first step; None: the same bits for
            all.
    Raises:
        ValueError: an option out of range.
    """
    choice("level", level, LEVELS)
    family = CODE_FAMILIES[choice("format", format, CODE_FAMILIES)]
    number(f"bits (format {format!r})", bits, least=family.widths[0], most=family.widths[-1])
    adapt_interval = None if adapt_interval is None else whole_number("adapt_interval", adapt_interval, 1)
    seed = whole_number("seed", seed)
    # first: it refuses a model without blocks, which must then be left as it was
    checkpointing = apply(model, "checkpoint") if level in ("CB1", "CB2") else None
    controller = Gact(model, BitPlan(float(bits), family), adapt_interval, seed)
    intercept(controller, model)
    if checkpointing is not None:
        controller.until_removed(checkpointing)
    if level == "CB2":
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                controller.until_removed(module.register_forward_pre_hook(_without_weights, with_kwargs=True))
    return controller


def _without_weights(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "need_weights": False}
