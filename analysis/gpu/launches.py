"""Print what a step launches on a GPU and how many bytes it moves, on paper: no GPU is needed, nothing is measured.

    python -m analysis.gpu.launches

The step runs on PyTorch's meta device, whose tensors have no values: what reads one back raises. A kernel in Triton
does not run, and notes its tensors; a dispatch mode notes PyTorch's operations, each as one launch. Bytes are those of
the tensors, each read or written once. Attention counts as two fused kernels, as PyTorch runs it on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

import dsq
from analysis.models import EncoderBlock
from dsq.command import OneLineParser, Record, table
from dsq.formats import Layout
from dsq.kernels import dispatch
from dsq.kernels.triton.backend import TRITON
from dsq.precision import DEFAULT_LEVELS
from dsq.stash.rules import attention

META = torch.device("meta")
#: PyTorch's operations that launch nothing
_IDLE = ("empty", "detach", "view", "promote_types", "lift_fresh", "set_", "resize")
#: PyTorch's operations that wait for the device
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim", "item")


class DeviceCall(NamedTuple):
    """A kernel in Triton, or one of PyTorch's operations."""

    name: str
    moved: float  #: bytes read and written
    in_triton: bool


class Counted(TorchDispatchMode):
    """The launches inside, and what waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[DeviceCall] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name().partition("::")[2].partition(".")[0], kwargs or {}
        inputs = args, {name: value for name, value in kwargs.items() if name != "out"}
        operands = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        by_mask = "index" in name and any(x.dtype is torch.bool for x in operands[1:])
        if (name in _WAITING or by_mask) and any(x.device == META for x in operands):
            self.waits.append(name)
        if name in ("_to_copy", "copy_"):
            source, target = operands[-1].device, torch.device(kwargs.get("device") or operands[0].device)
            # the host need not see when a copy to the device is done
            later = target == META and kwargs.get("non_blocking", len(args) > 2 and args[2])
            self.waits += [f"{name} from {source} to {target}"] * (source != target and not later)
        out = func(*args, **kwargs)
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        viewing = any(
            argument.alias_info is not None and not argument.alias_info.is_write for argument in func._schema.returns
        )
        if not viewing and not any(op in name for op in _IDLE):
            self.note(name, operands[1:] if name == "copy_" else operands, results)
        return out

    def note(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Add an operation of PyTorch's, if it runs on the device."""
        if any(x.device == META for x in outputs):
            moved = sum(x.nbytes for x in (*inputs, *outputs) if x.device == META)
            self.launches.append(DeviceCall(name, moved, False))


@contextmanager
def counted(plain: bool = False) -> Iterator[Counted]:
    """Inside, the Triton backend serves the meta device as it would serve a GPU; ``plain``: for a plain model."""
    mode = Counted()

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        return _Attention.apply(mode, q, k, v)  # type: ignore[no-untyped-call]

    # the table finds a row by PyTorch's function, which stays as it is; the row calls this one, in both passes
    functions = SimpleNamespace(**vars(F) | {"scaled_dot_product_attention": attend})
    attends: Any = (F, "scaled_dot_product_attention", attend) if plain else (attention, "F", functions)

    def note(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        moved = sum(x.nbytes for x in args if isinstance(x, Tensor))
        mode.launches.append(DeviceCall(kernel.fn.__name__, moved, True))

    with (
        patch.object(JITFunction, "run", note),
        patch.object(dispatch, "_dispatch_modes", int),  # kernels are called past the dispatcher, as without a mode
        patch.object(torch.cuda, "is_bf16_supported", lambda **_: True),
        patch.object(*attends),
        dispatch.use_backend(replace(TRITON), "meta"),  # a copy: kernels and plans are remembered by the backend
        mode,
    ):
        yield mode


class _Attention(torch.autograd.Function):
    """In the place of F.scaled_dot_product_attention, which the meta device does not have in one kernel."""

    @staticmethod
    def forward(ctx: Any, mode: Counted, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = torch.empty_like(q)
        mode.note("attention", [q, k, v], [y])
        ctx.mode = mode
        ctx.save_for_backward(q, k, v, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        *inputs, y = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in inputs]
        ctx.mode.note("attention_backward", [*inputs, y, dy], gradients)
        return None, *gradients


def step(model: nn.Module, shape: tuple[int, ...], plain: bool = False) -> Counted:
    """The forward and the backward of a warm step of a model on the meta device, whose input needs a gradient."""
    x = torch.empty(shape, dtype=next(model.parameters()).dtype, device=META, requires_grad=True)
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        with counted(plain) as counts:
            y = model(x)
            y.backward(torch.empty_like(y))
    return counts


def linear(width: int, levels: str | None) -> nn.Module:
    """A linear layer on the meta device, plain where there are no levels."""
    return nn.Linear(width, width, True, META) if levels is None else dsq.Linear(width, width, True, levels, META)


def block(width: int, levels: str | None) -> nn.Module:
    """A pre-LN block on the meta device with attention in one call; with levels, everything that it keeps is packed."""
    model = EncoderBlock(width, width // 64, 4 * width, sdpa=True).to(META)
    if levels is not None:
        dsq.convert(model, dsq.DSQConfig(levels=levels, stash="all"))
    return model


def least(tokens: int, width: int, levels: str, dtype: torch.dtype) -> int:
    """The bytes that a linear layer's step has to move: x, w and y, dy, w, dx and dw, the bias and its gradient, each
    once; and the stash of x twice."""
    x = torch.Size((tokens, width))
    x_for_dw = dsq.Quantizers.of(levels).linear_matmuls.x_for_dw
    packed = x_for_dw.quantized_to.nbytes(Layout.of(x, x_for_dw.axis))
    return dtype.itemsize * (4 * x.numel() + 3 * width * width + 2 * width) + 2 * packed


LEVELS = str(DEFAULT_LEVELS[0])
TOKENS, WIDTH = 8192, 4096
#: of a block, whose sequences have 1,024 tokens
BLOCK = (8, 1024, 1024)


def counts() -> Iterator[Record]:
    """A row a step: launches and bytes."""
    for name, make, shape in (("linear", linear, (TOKENS, WIDTH)), ("block, all packed", block, BLOCK)):
        for dtype in (torch.float32, torch.bfloat16):
            for levels in (None, LEVELS):
                found = step(make(shape[-1], levels).to(dtype), shape, levels is None).launches
                moved = sum(launch.moved for launch in found)
                row: dict[str, Any] = {"step": name, "dtype": str(dtype).removeprefix("torch.")}
                row |= {"by": levels or "plain PyTorch", "launches": len(found)}
                row |= {"in Triton": sum(launch.in_triton for launch in found), "GB": f"{moved / 1e9:.2f}"}
                linears = levels and name == "linear"
                row["x least"] = f"{moved / least(TOKENS, WIDTH, LEVELS, dtype):.1f}" if linears else ""
                yield row


if __name__ == "__main__":
    OneLineParser(prog="python -m analysis.gpu.launches", description=__doc__).parse_args()
    print(f"A linear layer of {WIDTH:,} x {WIDTH:,} at {TOKENS:,} tokens; a block of width 1,024\n")
    print(table(list(counts())))
