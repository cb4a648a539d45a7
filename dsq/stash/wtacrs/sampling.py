"""Winner-take-all column-row sampling: which rows of a product to keep, and how much each counts.

Pure functions of probabilities and of uniform random numbers; they know neither layers nor stashes, read nothing back
from the device and loop over no rows. Equations are those of WTA-CRS (Liu et al., 2023, arXiv 2305.15265).

Shapes: T rows (tokens) of the product, k of them kept; further leading dimensions are further products.
"""

import torch
from torch import Tensor

#: Cached gradient norms are raised to this part of their mean. A cached zero says nothing certain of this step: a row
#: that could never be drawn would bias the estimate, and one that hardly ever is would make its variance boundless.
NORM_FLOOR = 0.1


def budget(tokens: int, ratio: float) -> int:
    """Return k = round(ratio * tokens), the rows to keep; at least one."""
    return max(1, round(ratio * tokens))


def probabilities(h_norm_T: Tensor, dz_norm_T: Tensor | None = None) -> Tensor:
    """Return p_i = ||H_i|| ||dZ_i|| / sum_j ||H_j|| ||dZ_j|| (equation 3), in float64.

    Args:
        h_norm_T: norms of the rows of H.
        dz_norm_T: expected norms of the rows of dZ, floored at ``NORM_FLOOR`` of their mean; None before any is known:
            p_i ~ ||H_i||.
    Where every product is zero so is the gradient, and p is uniform. A NaN or an infinity makes p NaN.
    """
    weight_T = h_norm_T.double()
    if dz_norm_T is not None:
        dz_norm_T = dz_norm_T.double()
        weight_T = weight_T * dz_norm_T.clamp(min=NORM_FLOOR * dz_norm_T.mean())
    total = weight_T.sum(-1, keepdim=True)
    weight_T = torch.where(total == 0, torch.ones_like(weight_T), weight_T)
    return weight_T / weight_T.sum(-1, keepdim=True)


def sample_rows(p_T: Tensor, k: int, uniform_k: Tensor, winners: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the kept rows and their scales: X Y ~ sum_t scale_t X[:, row_t] Y[row_t, :], unbiased (equation 6,
    algorithm 2).

    The winners C, the |C| likeliest rows, are kept with scale 1. The other k - |C| are drawn with replacement from the
    rest, row j with probability q_j = p_j / (1 - sum_C p). The average of n = k - |C| draws of X_j Y_j / q_j has the
    mean sum_{j not in C} X_j Y_j, so a drawn row's scale is 1 / (n q_j) = (1 - sum_C p) / ((k - |C|) p_j), algorithm
    2's; the text of section 3.2 drops the 1 / p_j that equation 6 hides in f(j).

    Args:
        p_T: probabilities of the rows; any positive multiple of them does as well.
        k: rows to keep, 1 <= k <= T.
        uniform_k: k random numbers of [0, 1), float64, on the device of ``p_T``.
        winners: |C|, less than k; default the minimiser of (1 - sum_C p) / (k - |C|) (theorem 2). 0 is plain CRS
            (equation 5).
    Returns:
        rows (k, int64; winners first, likeliest first) and scales (k, float32).
    """
    ascending_T, order_T = p_T.sort()
    mass_T = ascending_T.cumsum(-1)  # mass_T[T - 1 - c] is 1 - sum_C p for |C| = c, without cancellation
    slot_k = torch.arange(k, device=p_T.device)
    rest_k = mass_T.flip(-1)[..., :k]
    c = (rest_k / (k - slot_k)).argmin(-1, keepdim=True)
    if winners is not None:
        c = torch.full_like(c, winners)
    rest = rest_k.gather(-1, c)

    last = p_T.shape[-1] - 1
    drawn_k = torch.searchsorted(mass_T, uniform_k * rest, right=True).minimum(last - c)
    won_k = slot_k < c
    position_k = torch.where(won_k, last - slot_k, drawn_k)
    scale_k = torch.where(won_k, 1.0, rest / ((k - c) * ascending_T.gather(-1, position_k)))
    # nothing left to draw from: rows of no weight, which must not count (0 / 0 above)
    scale_k = torch.where((rest == 0) & ~won_k, 0.0, scale_k)
    return order_T.gather(-1, position_k), scale_k.float()
