"""A linear layer at [q0, q1, q2, q3]: dynamic stashing quantization (DSQ, section 3, figure 2).

    forward    y  = Q0(x) Q0(w)^T + b              stash Q1(x), packed
    backward   dx = Q3(Q2(dy) Qw(w))
               dw = Q3(dy)^T Q1(x)
               db = sum of dy over tokens

Shape suffixes: T tokens (all leading dimensions), K in-features, N out-features. Blocks run along the contraction axis
of the product that consumes the tensor: K for y, N for dx, T for dw. The weight still exists in the backward, which
quantizes it there. It takes no bytes of the stash, so Qw may have more bits than the paper's Q1: max(q1, min(q0, 5)) by
default (DSQConfig.min_weight_bits).

A call goes linear -> _Linear.forward -> ops/linear_passes.py; in training under a stash policy, as by default, its mode
takes it instead to QuantizedLinear.forward (stash/rules/products.py) -> linear_passes. Quantizers (quantizers.py) hold
the formats of the three products as LinearMatMuls, of which linear_passes makes a plan for the shapes and dtypes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import handle_torch_function

from dsq.kernels.backend import Codes, LinearMatMuls
from dsq.ops import linear_passes
from dsq.ops.checks import check_tensors, of_another_quantization
from dsq.ops.shared_inputs import input_key, shared_inputs_now
from dsq.ops.torch_checkpoint import hold_level, innermost_hooks
from dsq.precision import DEFAULT_LEVELS, Precision
from dsq.quantizers import NO_JIT, Quantized, Quantizers

_function_mode = torch._C._is_torch_function_mode_enabled


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, precision: Precision | str | Quantizers) -> Tensor:
    """Compute ``torch.nn.functional.linear`` with the tensors of its three products quantized, and a packed stash.

    If ``weight`` needs a gradient, Q1(x) is saved in packed form, once for all calls that share ``x`` in a forward of a
    converted model. If ``x`` needs one, the weight itself is saved: it must not change in place before the backward.
    Stochastic rounding draws its seed from torch's default generator. Differentiable once, and not by
    torch.func.

    Args:
        x: (..., K) floating tensor, any number of leading dimensions.
        weight: (N, K), of the dtype of ``x``. Under autocast dtypes may differ, and the operands are quantized from the
            tensors without a cast.
        bias: (N,) or None.
        precision: Quantizers, or four widths of the default format, rounded to nearest: "[4,4,4,8]".
    Returns:
        (..., N) tensor of the dtype of ``x``, or of autocast's.
    Raises:
        TypeError: dtypes differ, or an argument is no dense tensor. ValueError: shapes or devices do not fit, or the
            precision is malformed.
    """
    if _function_mode():  # the mode then sees one call, and not each attribute of a tensor that is read below
        return handle_torch_function(linear, (x, weight, bias), x, weight, bias, precision)
    quantizers = precision if type(precision) is Quantizers else Quantizers.of(precision)
    check_tensors(x, weight, bias)
    seed = quantizers.seed() if quantizers.draws else None
    trained = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    # PyTorch refuses an autograd function in forward mode; the kernels would lose the tangents
    if (trained and torch.is_grad_enabled() and not torch.compiler.is_exporting()) or forward_ad._current_level >= 0:
        return _Linear.apply(x, weight, bias, quantizers.linear_matmuls, seed)  # type: ignore[no-any-return, no-untyped-call]
    plan = linear_passes.plan_of(quantizers.linear_matmuls, x, weight, bias, seed is not None)
    return linear_passes.forward(plan, x, weight, bias, seed, stashing=False)[0]


def layer_linear(layer: Quantized, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``linear`` at the level of ``layer``, or ``F.linear`` if the layer evaluates in floating point.

    Under dsq.compile at a saving level, ``F.linear``: the graph packs x.
    """
    if layer.eval_full_precision and not layer.training:  # evaluates_unquantized, without its call
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():
        if layer.graph_packs and layer.quantizers.mode == "saving":
            return F.linear(x, weight, bias)
    elif innermost_hooks() is not None:  # those of a checkpoint, perhaps
        hold_level(layer)
    if type(weight) not in (nn.Parameter, Tensor) and isinstance(weight, Tensor):
        if of_another_quantization(weight):  # since the conversion
            return F.linear(x, weight, bias)
        if hasattr(weight, "device_mesh"):
            from dsq.ops.tensor_parallel import sharded_linear  # importing torch.distributed.tensor takes half a second

            return sharded_linear(
                _Linear.apply, x, weight, bias, layer.quantizers.linear_matmuls, layer.quantizers.seed()
            )
    return linear(x, weight, bias, layer.quantizers)


class _Linear(torch.autograd.Function):
    """The linear layer of a training forward.

    If x needs a gradient, it saves w_NK itself. If w needs one, it saves Q1(x) as codes and scales (uint8), or x as it
    is where q1 does not quantize. Layers that read one x in one forward save the codes of the first of them, at no
    further bytes (ops/shared_inputs.py). ``seed`` is an int, or None where nothing is rounded stochastically.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_NK: Tensor, bias: Tensor | None, matmuls: LinearMatMuls, seed: Any) -> Tensor:
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise RuntimeError(f"torch.jit.trace takes converted layers under torch.no_grad() alone; {NO_JIT}")
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        plan = ctx.plan = linear_passes.plan_of(matmuls, x, w_NK, bias, seed is not None)
        ctx.seed = seed
        # without direct calls a compiler or a mode sees each product, and may remove duplicate packing by itself
        may_share = (
            needs_dw and plan.direct_calls is not None and plan.x_for_dw.packs and not plan.x_for_dw.is_of_one_call
        )
        ctx.shared_inputs = shared_inputs = shared_inputs_now() if may_share else None
        shared_codes = None
        if shared_inputs is not None:
            key = input_key(x, plan.x_for_dw, seed is None)
            shared_codes = shared_inputs.find(key)
        y, saved_x = linear_passes.forward(plan, x, w_NK, bias, seed, stashing=needs_dw and shared_codes is None)
        if shared_inputs is not None and isinstance(saved_x, Codes):
            shared_inputs.put(key, x, saved_x)
        saved_x = saved_x if shared_codes is None else shared_codes
        x_or_codes = (None, saved_x.codes, saved_x.scales) if isinstance(saved_x, Codes) else (saved_x, None, None)
        ctx.save_for_backward(w_NK if needs_dx else None, *x_or_codes)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            once = "dsq.functional.linear is differentiable once: create_graph=True is not supported"
            raise RuntimeError(f"{once}; skip the layers by DSQConfig(exclude=...) or dsq.unconvert(model)")
        if ctx.shared_inputs is not None:
            ctx.shared_inputs.open = False  # the forward is over: no later layer may find its codes
        w_NK, x, codes, scales = ctx.saved_tensors
        saved_x = x if codes is None else Codes(codes, scales, ctx.plan.x_shape_TK)
        dx, dw_NK = linear_passes.backward(ctx.plan, dy, w_NK, saved_x, ctx.seed)
        db_N = linear_passes.as_rows(dy).sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw_NK, db_N, None, None


class Linear(Quantized, nn.Linear):
    """``nn.Linear`` whose three products run quantized and whose stash is packed; same parameters, same state dict.

    In training mode and in evaluation alike the forward runs at q0; ``eval_full_precision`` makes evaluation run in
    floating point. Shapes and errors are those of ``dsq.functional.linear``.
    """

    original = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        precision: Precision | str | Quantizers = DEFAULT_LEVELS[0],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.quantizers = Quantizers.of(precision)

    def forward(self, input: Tensor) -> Tensor:  # the name is nn.Linear's
        if not isinstance(self, Quantized):  # unconverted under a wrapper of this function, such as accelerate's
            return type(self).forward(self, input)
        return layer_linear(self, input, self.weight, self.bias)
