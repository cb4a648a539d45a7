"""Print what a step launches on a GPU and what that should take, on paper: no GPU is needed, nothing is measured.

    python -m analysis.gpu.expected [--check build/gpu_check --card h200]

The step runs on PyTorch's meta device, whose tensors have no values: what reads one back raises. A kernel in Triton
does not run, and notes its tensors; a dispatch mode notes PyTorch's operations, each as one launch. Bytes are those of
the tensors, each read or written once. Attention counts as two fused kernels, as PyTorch runs it on a GPU.

A launch takes what is longest of 5 us, its bytes at the bandwidth that programs reach, and its multiply-accumulates at
the rate that they reach (dsq-cost's hardware files). With boxes of 16 an int8 product uses half of its units, and takes
three instructions for each box of each sum; with one step for 128 values, which few codes of 8 bits allow, it does
neither. What codecs compute is left out.

``--check``: rows that analysis.gpu.check measured, beside what ``--card``, which it ran on, should take.
"""

import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
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
from dsq.costmodel.hardware.hardware import MICRO, Hardware, load_hardware
from dsq.formats import BFP, Layout, SignedNVInt
from dsq.kernels import dispatch
from dsq.kernels.triton.backend import TRITON
from dsq.precision import DEFAULT_LEVELS
from dsq.stash.table import attention

# ---- what a step launches, what each launch moves, and where the step waits

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
    products: int = 0  #: multiply-accumulates of a product of matrices


class Counted(TorchDispatchMode):
    """The launches inside, and what waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[DeviceCall] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name().partition("::")[2].partition(".")[0], kwargs or {}
        inputs = args, {name: value for name, value in kwargs.items() if name != "out"}
        given = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        by_mask = "index" in name and any(x.dtype is torch.bool for x in given[1:])
        if (name in _WAITING or by_mask) and any(x.device == META for x in given):
            self.waits.append(name)
        if name in ("_to_copy", "copy_"):
            source, target = given[-1].device, torch.device(kwargs.get("device") or given[0].device)
            # the host need not see when a copy to the device is done
            later = target == META and kwargs.get("non_blocking", len(args) > 2 and args[2])
            self.waits += [f"{name} from {source} to {target}"] * (source != target and not later)
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        viewing = any(it.alias_info is not None and not it.alias_info.is_write for it in func._schema.returns)
        if not viewing and not any(it in name for it in _IDLE):
            self.note(name, given[1:] if name == "copy_" else given, made)
        return out

    def note(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        """Add an operation of PyTorch's, if it runs on the device."""
        if any(x.device == META for x in made):
            products = made[0].numel() * given[-1].shape[-2] if name in ("mm", "addmm", "bmm") else 0
            moved = sum(x.nbytes for x in (*given, *made) if x.device == META)
            self.launches.append(DeviceCall(name, moved, False, products))


@contextmanager
def counted(gemm: str | None = "bfloat16") -> Iterator[Counted]:
    """Inside, the Triton backend serves the meta device as it would serve a GPU. ``gemm`` multiplies where it fits;
    None: the model is a plain one."""
    mode = Counted()

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        return _Attention.apply(mode, q, k, v)  # type: ignore[no-untyped-call]

    # the table finds a row by PyTorch's function, which stays as it is; the row calls this one, in both passes
    functions = SimpleNamespace(**vars(F) | {"scaled_dot_product_attention": attend})
    attends: Any = (F, "scaled_dot_product_attention", attend) if gemm is None else (attention, "F", functions)

    def note(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        products = args[8] * args[9] * args[12] if kernel.fn.__name__ == "multiply" else 0
        moved = sum(x.nbytes for x in args if isinstance(x, Tensor))
        mode.launches.append(DeviceCall(kernel.fn.__name__, moved, True, products))

    with (
        patch.object(JITFunction, "run", note),
        patch.object(dispatch, "_dispatch_modes", int),  # kernels are called past the dispatcher, as without a mode
        patch.object(torch.cuda, "is_bf16_supported", lambda **_: True),
        patch.object(*attends),
        patch.dict("os.environ", {"DSQ_GEMM": gemm or ""}),
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


def step(model: nn.Module, shape: tuple[int, ...], gemm: str | None = "bfloat16") -> Counted:
    """The forward and the backward of a warm step of a model on the meta device, whose input needs a gradient."""
    x = torch.empty(shape, dtype=next(model.parameters()).dtype, device=META, requires_grad=True)
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        with counted(gemm) as found:
            y = model(x)
            y.backward(torch.empty_like(y))
    return found


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
    stash = dsq.Quantizers.of(levels).matmuls.stash
    packed = stash.quantised_to.nbytes(Layout.of(x, stash.axis))
    return dtype.itemsize * (4 * x.numel() + 3 * width * width + 2 * width) + 2 * packed


def codecs(tokens: int, width: int, dtype: torch.dtype) -> Iterator[tuple[str, list[DeviceCall], int]]:
    """Yield a name, the launches and the least bytes of quantise (to bfloat16), pack and unpack: what is read, once,
    and what is made."""
    x = torch.empty(tokens, width, dtype=dtype, device=META)
    for fmt, dim in itertools.product((BFP(8), BFP(4), SignedNVInt(4)), (-1, 0)):
        layout, axis = Layout.of(x.shape, dim), "rows" if dim == 0 else "columns"
        codes = torch.empty(layout.code_shape(fmt.bits), dtype=torch.uint8, device=META)
        scales = torch.empty(fmt.scale_shape(layout), dtype=torch.uint8, device=META)
        calls = (
            ("quantise", partial(TRITON.quantize, x, fmt, layout, None, torch.bfloat16), 2 * x.numel()),
            ("pack", partial(TRITON.pack, x, fmt, layout, None), fmt.nbytes(layout)),
            ("unpack", partial(TRITON.unpack, codes, scales, fmt, layout, dtype), fmt.nbytes(layout)),
        )
        for name, call, other in calls:
            with counted() as found:
                call()
            yield f"{name} {fmt.name} {fmt.bits} bits, boxes along {axis}", found.launches, x.nbytes + other


# ---- what the launches should take

CARDS = ("a100-80gb", "h100", "rtx-4090")
LEVELS = str(DEFAULT_LEVELS[0])
LAUNCH = 5 * MICRO
TOKENS, WIDTH = 8192, 4096
#: of a block, whose sequences have 1,024 tokens
BLOCK = (8, 1024, 1024)
INT8 = "int8 128x128"
#: instructions of the vector units for a box of an int8 sum: to float32, times one step, times the other and add
STEP_INSTRUCTIONS = 3
BOX, RUN = 16, 128


def seconds(launch: DeviceCall, card: Hardware, span: int = BOX) -> tuple[float, str]:
    """The time of a launch, and what bounds it; ``span``: values that an int8 product sums before it takes a step."""
    times = {"launch": LAUNCH, "bandwidth": launch.moved / card.bandwidth}
    if launch.products:
        kind = "int8" if launch.in_triton else "bf16"
        rate = next(peak.flops for peak in card.peaks if peak.datatype == kind)
        times[kind] = 2 * launch.products / rate * (max(1, 32 / span) if launch.in_triton else 1)
        if launch.in_triton:
            times["steps"] = STEP_INSTRUCTIONS * launch.products / span / (card.vector_flops / 2)
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound


def total(launches: Iterable[DeviceCall], card: Hardware, span: int = BOX) -> float:
    return sum(seconds(launch, card, span)[0] for launch in launches)


@cache
def linear_step(width: int, gemm: str | None) -> list[DeviceCall]:
    """Return the launches of a linear layer's step in bfloat16; a plain one's where ``gemm`` is None."""
    return step(linear(width, gemm and LEVELS).to(torch.bfloat16), (TOKENS, width), gemm).launches


def counts() -> Iterator[Record]:
    """A row a step: launches and bytes."""
    for what, make, shape in (("linear", linear, (TOKENS, WIDTH)), ("block, all packed", block, BLOCK)):
        for dtype in (torch.float32, torch.bfloat16):
            for gemm in (None, "bfloat16", INT8):
                found = step(make(shape[-1], gemm and LEVELS).to(dtype), shape, gemm).launches
                moved = sum(it.moved for it in found)
                row: dict[str, Any] = {"step": what, "dtype": str(dtype).removeprefix("torch.")}
                row |= {"by": gemm or "plain PyTorch", "launches": len(found)}
                row |= {"in Triton": sum(it.in_triton for it in found), "GB": f"{moved / 1e9:.2f}"}
                linears = gemm and what == "linear"
                row["x least"] = f"{moved / least(TOKENS, WIDTH, LEVELS, dtype):.1f}" if linears else ""
                yield row


def times(card: Hardware) -> Iterator[Record]:
    """A row a kernel or step: its expected time on a card in bfloat16, and what bounds most of it."""
    for name, launches, few in codecs(TOKENS, WIDTH, torch.bfloat16):
        moved = sum(it.moved for it in launches)
        yield {**_row(card, name, launches), "x least bytes": f"{moved / few:.2f}"}
    for by, gemm, span in (
        ("plain bf16", None, BOX),
        ("dsq by bf16 products", "bfloat16", BOX),
        ("dsq by int8, a step for 16", INT8, BOX),
        ("dsq by int8, a step for 128", INT8, RUN),
    ):
        yield _row(card, f"linear, forward and backward, {by}", linear_step(WIDTH, gemm), span)


def _row(card: Hardware, name: str, launches: list[DeviceCall], span: int = BOX) -> Record:
    by_bound: dict[str, float] = {}
    for launch in launches:
        taken, bound = seconds(launch, card, span)
        by_bound[bound] = by_bound.get(bound, 0) + taken
    whole = sum(by_bound.values())
    most = max(by_bound, key=lambda bound: by_bound[bound])
    return {"": name, "us": f"{whole / MICRO:,.0f}", "bound": f"{most} ({by_bound[most] / whole:.0%})"}


def wins_from(card: Hardware, span: int) -> str:
    """The least width, of powers of two, at which a square linear layer by int8 should beat bf16."""
    for width in (2**power for power in range(8, 16)):
        if total(linear_step(width, INT8), card, span) < total(linear_step(width, None), card, span):
            return f"{width:,}"
    return "none"


def beside(card: Hardware, folder: Path) -> Iterator[Record]:
    """Rows of the check's bandwidth and products with what they should take."""
    paths = [path for part in ("bandwidth", "products") if (path := folder / f"{part}.jsonl").exists()]
    for row in (json.loads(line) for path in paths for line in path.read_text().splitlines()):
        if "us" in row:
            launch, measured = DeviceCall("", 1e6 * row["MB moved"], True), row["us"]
        elif "ms" in row and (sizes := re.match(r"(\d+)x(\d+)x(\d+) .*(bfloat16|int8)", row["name"])):
            rows, columns, depth = map(int, sizes.groups()[:3])
            moved = 2 * (rows * depth + depth * columns) + 4 * rows * columns
            launch = DeviceCall("", moved, ", int8" in row["name"], rows * columns * depth)
            measured = 1000 * row["ms"]
        else:
            continue
        expected = seconds(launch, card)[0] / MICRO
        yield {"": row["name"], "expected us": f"{expected:.0f}", "measured us": f"{measured:.0f}"}


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.gpu.expected", description=__doc__)
    parser.add_argument("--check", type=Path, help="folder of analysis.gpu.check's results")
    parser.add_argument("--card", default=CARDS[0], help="dsq-cost's name of the GPU that the check ran on")
    args = parser.parse_args(argv)
    cards = [load_hardware(name) for name in CARDS]
    print(f"Counted: a linear layer of {WIDTH:,} x {WIDTH:,} at {TOKENS:,} tokens; a block of width 1,024\n")
    print(table(list(counts())))
    for card in cards:
        print(f"\nExpected, not measured: {card.name}, values in bfloat16\n")
        print(table(list(times(card))))
        won = [wins_from(card, span) for span in (BOX, RUN)]
        print(f"\nint8 beats bf16 from width: a step for 16 values {won[0]}, a step for 128 values {won[1]}")
    if args.check:
        card = load_hardware(args.card)
        print(f"\nExpected beside measured: {card.name}\n")
        print(table(list(beside(card, args.check))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
