"""How long a run is, known when its batches are."""

from typing import Any


def total_updates(optimization: Any, batches: int) -> int:
    """The updates after which --max-update or --max-epoch ends a run, whichever is first; 0 where neither is given.

    optimization: fairseq's config of that name. batches: of an epoch, of one worker; every epoch has as many. 0: they
    differ (data in several folders), and no number of epochs is a number of updates. Updates that a worker skips (an
    overflow of --fp16) make the run shorter by as many, where epochs end it.
    """
    each = [batches // n if optimization.skip_remainder_batch else -(-batches // n) for n in optimization.update_freq]
    epochs = int(optimization.max_epoch or 0)
    by_epochs = sum(each[:epochs]) + max(epochs - len(each), 0) * each[-1]
    return min(filter(None, (int(optimization.max_update or 0), by_epochs)), default=0)
