"""The rows and scales of the column-row estimator against the paper's formulas, written out over rows in NumPy."""

import numpy as np
import pytest
import torch

from dsq.stash.wtacrs import NORM_FLOOR, probabilities, sample_rows

T, IN, OUT = 96, 8, 6


def product(seed: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """H (T, IN) and dZ (T, OUT) whose row norms are log-normal: the larger ``spread``, the fewer rows matter."""
    g = torch.Generator().manual_seed(seed)
    size_T = torch.exp(spread * torch.randn(T, 1, generator=g, dtype=torch.float64))
    h_TK = torch.randn(T, IN, generator=g, dtype=torch.float64) + 0.5
    dz_TN = torch.randn(T, OUT, generator=g, dtype=torch.float64) + 0.5
    return h_TK * size_T, dz_TN


def optimal(h_TK: torch.Tensor, dz_TN: torch.Tensor) -> torch.Tensor:
    return probabilities(h_TK.norm(dim=1), dz_TN.norm(dim=1))


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.5, 3.0])
@pytest.mark.parametrize("k", [1, 29, 95])
def test_winners_minimise_the_bound_of_theorem_2(spread, k):
    p_T = optimal(*product(1, spread))
    rows_k, scale_k = sample_rows(p_T, k, torch.rand(k, dtype=torch.float64))
    p = np.sort(p_T.numpy())[::-1]
    bound = [(1 - p[:c].sum()) / (k - c) for c in range(k)]
    c = int(np.argmin(bound))
    assert rows_k[:c].tolist() == np.argsort(-p_T.numpy())[:c].tolist()
    assert (scale_k[:c] == 1).all()
    rest = set(np.argsort(-p_T.numpy())[c:].tolist())
    assert set(rows_k[c:].tolist()) <= rest
    # algorithm 2: (1 - sum_C p) / ((k - |C|) p_j)
    expected = [bound[c] / p_T[j].item() for j in rows_k[c:].tolist()]
    np.testing.assert_allclose(scale_k[c:].numpy(), expected, rtol=1e-6)


def test_rows_that_carry_everything_make_it_exact():
    h_TK, dz_TN = product(6, 0.0)
    h_TK[5:] = 0
    for k in (5, 6, 30):
        rows_k, scale_k = sample_rows(optimal(h_TK, dz_TN), k, torch.rand(k, dtype=torch.float64))
        torch.testing.assert_close(h_TK[rows_k].T @ (dz_TN[rows_k] * scale_k[:, None]), h_TK.T @ dz_TN)


def test_probabilities():
    h = torch.tensor([3.0, 1.0, 0.0])
    torch.testing.assert_close(probabilities(h), torch.tensor([0.75, 0.25, 0.0], dtype=torch.float64))
    torch.testing.assert_close(
        probabilities(h, torch.tensor([1.0, 3.0, 2.0])), torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    )
    p = probabilities(torch.ones(4), torch.tensor([0.0, 1.0, 1.0, 2.0]))
    assert (p[0] / p[1]).item() == pytest.approx(NORM_FLOOR)  # a cached norm of zero leaves a row its chance
    assert probabilities(torch.zeros(4)).tolist() == [0.25] * 4
    assert probabilities(torch.ones(4), torch.zeros(4)).tolist() == [0.25] * 4


def test_the_ends_of_the_uniform_interval_draw_the_ends_of_the_rest():
    p_T = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    ends = torch.tensor([0.0, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    rows_k, _ = sample_rows(p_T, 3, ends, winners=0)
    assert rows_k.tolist() == [1, 4, 3]  # never the row of probability zero
