"""What every backend must pass: the reference's bits for codecs and masks, products exact to the order of their sums.

from dsq.kernels.conformance import failures
assert not list(failures(backend, torch.device("cpu")))

A file for each of kernels/reference's, and linear.py for a layer's passes in one call.
"""

from collections.abc import Iterator

import torch

from dsq.kernels.backend import Backend
from dsq.kernels.conformance.affine import affine_disagreements
from dsq.kernels.conformance.codec import cases, disagreements
from dsq.kernels.conformance.gemm import product_disagreements, products
from dsq.kernels.conformance.linear import linear_disagreements
from dsq.kernels.conformance.masks import mask_disagreements


def failures(backend: Backend, device: torch.device) -> Iterator[str]:
    """Everything in which ``backend`` on ``device`` is not what a backend must be; nothing where it conforms."""
    for case in cases(backend.formats):
        wrong = disagreements(backend, case, device)
        if wrong:
            yield f"{case}: {' '.join(wrong)}"
    for trials in (
        mask_disagreements(backend, device),
        affine_disagreements(backend, device),
        linear_disagreements(backend, device),
    ):
        yield from (f"{what}: {differs}" for what, differs in trials if differs)
    for product in products():
        wrong = product_disagreements(backend, product, device)
        if wrong:
            yield f"{product}: {' '.join(wrong)}"
