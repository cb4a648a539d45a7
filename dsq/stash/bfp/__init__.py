"""DSQ's stash for every saved tensor (DSQ, section 3, beyond the GEMM inputs): a number format at q1.

The policy has the name of the paper's format, block floating point. Boxes run over 16 values that are neighbours in
memory, so all views of a tensor share one code: 4.5 bits a value at q1 = 4, 2.5 at 2. Exact stay: weights; masks of
ReLU and dropout, in one bit; indices of max-pool, in the narrowest integer; statistics (mean and 1/std of norms,
attention's logsumexp); what cross entropy inside the model keeps; what an op's backward compares (amax, abs) or
divides by (log, sqrt, div, norms of rows); and tensors of few values. The uint8 codes of a dsq.Linear or of another
policy are left alone.
"""

from typing import get_args

from torch import nn

from dsq.arguments import choice, whole_number
from dsq.formats import FORMATS, NARROWEST, WIDEST
from dsq.packing import Rounding
from dsq.scheduler import PrecisionScheduler
from dsq.stash.bfp.controller import Bfp
from dsq.stash.controller import Controller
from dsq.stash.policy import register
from dsq.stash.saved_tensors.compiled_graphs.blocks import around_compiled_blocks
from dsq.stash.saved_tensors.hooks import around_forward


@register("bfp", composes_with=("selective", "wtacrs", "checkpoint"), compiled="model")
def attach(
    model: nn.Module,
    *,
    bits: int | None = None,
    format: str | None = None,
    box: int | None = None,
    rounding: Rounding = "nearest",
    seed: int = 0,
    scheduler: PrecisionScheduler | None = None,
) -> Controller:
    """Pack the model's saved tensors at q1.

    Args:
        bits: q1, 2 to 16; above, up to 32, tensors stay as they are. None: the q1 of the scheduler; without one, that
            of the model's dsq.Linear layers, whatever level they are at, but no less than 4; without any, 4.
        format: a name of dsq.formats.FORMATS, "bfp" the paper's. None: the format of the model's dsq.Linear layers at
            q1; without any, snvint, which loses least (docs/formats.md). Wider codes than it is useful to are bfp's.
        box: values that share a scale. None: as in the layers, where their format is taken, else 16.
        rounding: nearest or stochastic; seed: of stochastic rounding, with the step and the tensor's turn mixed in.
        scheduler: a dsq.PrecisionScheduler whose level the stash follows.
    Raises:
        ValueError: an option out of range, bits and scheduler both given.
    """
    if bits is not None and scheduler is not None:
        raise ValueError(f"bits={bits!r} and scheduler were both given: the scheduler says the bits")
    if scheduler is not None and not isinstance(scheduler, PrecisionScheduler):
        raise ValueError(f"scheduler must be None or a dsq.PrecisionScheduler, got {scheduler!r}")
    if bits is not None:
        bits = whole_number("bits", bits, NARROWEST, WIDEST)
    if format is not None:
        choice("format", format, FORMATS)
    choice("rounding", rounding, get_args(Rounding))
    controller = Bfp(model, bits, format, box, rounding, whole_number("seed", seed), scheduler)
    controller.format_now()  # refuses a box that the format has not
    around_forward(controller, model, controller.context)
    around_compiled_blocks(controller, model)
    controller.until_removed(model.register_forward_pre_hook(controller.before, prepend=True, with_kwargs=True))
    return controller
