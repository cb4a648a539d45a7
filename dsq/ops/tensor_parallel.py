"""Layers whose weight ColwiseParallel or RowwiseParallel sharded: the passes of dsq.linear on each rank's shard.

    column-wise, w (N/ranks, K): y = Q0(x) Q0(w)^T is sharded like w; dx is a sum over ranks, and Q3 comes after it
    row-wise, w (N, K/ranks):    y is a sum over ranks, and the bias comes after it; dx is sharded like w

Blocks stay whole, and numbers those of one process but for the order of sums, where a rank's share of N and K is a
multiple of the block.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dsq.kernels.backend import LinearMatMuls, MatMul
from dsq.kernels.dispatch import quantize


def sharded_linear(
    apply: Callable[..., Tensor], x: Tensor, weight: Any, bias: Any, matmuls: LinearMatMuls, seed: int | None
) -> DTensor:
    """Return ``apply(x, weight, bias, matmuls, seed)`` of DTensors ``weight`` and ``bias``, by ``apply`` on the shards.

    Raises ValueError where ``weight`` is sharded in another way, or ``bias`` is no DTensor.
    """
    mesh, (placement, *surplus) = weight.device_mesh, weight.placements
    if surplus or placement not in (Shard(0), Shard(1)):
        raise ValueError(f"weight must be sharded as Shard(0) or Shard(1) over one axis, got {weight.placements}")
    if not (bias is None or isinstance(bias, DTensor)):
        raise ValueError("bias must be a DTensor where weight is one: shard or replicate it too")
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    if placement == Shard(1):
        y = apply(_local(x, Shard(x.dim() - 1)), _local(weight, placement), None, matmuls, seed)
        total = DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        return total if bias is None else cast(DTensor, total + bias)
    whole = _RoundedGradient.apply(  # type: ignore[no-untyped-call]
        x.redistribute(placements=[Replicate()]), matmuls.input_gradient, seed
    )
    x_local = whole.to_local(grad_placements=[Partial()])
    bias_local = None if bias is None else _local(bias, Shard(0))
    unrounded = matmuls._replace(input_gradient=replace(matmuls.input_gradient, result=None))
    y = apply(x_local, _local(weight, placement), bias_local, unrounded, seed)
    return DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False)


def _local(x: DTensor, placement: Placement) -> Tensor:
    return x.redistribute(placements=[placement]).to_local()


class _RoundedGradient(torch.autograd.Function):
    """``x`` itself; its gradient, summed over the ranks, at q3."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, matmul: MatMul, seed: int | None) -> DTensor:
        ctx.matmul, ctx.seed = matmul, seed
        return cast(DTensor, x.view_as(x))

    @staticmethod
    def backward(ctx: Any, dx: DTensor) -> tuple[DTensor, None, None]:
        matmul, seed = ctx.matmul, ctx.seed
        total = _local(dx, Replicate())
        if matmul.result is not None:
            total = quantize(total, matmul.result, -1, matmul.seed_of_result(seed))
        return DTensor.from_local(total, dx.device_mesh, [Replicate()], run_check=False), None, None
