"""Report how much of a model is quantized: FLOPs of matrix products, layers by name, saved bytes, time."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark.utils.timer import timer as wall_clock  # waits for a GPU
from torch.utils.flop_counter import FlopCounterMode

from dsq.arguments import as_called
from dsq.command import table
from dsq.conversion import as_unconverted, converted
from dsq.first_training import awaited, trial
from dsq.gradient_check import GradientCheck, compare, undisturbed, without_gradients
from dsq.linear import Linear
from dsq.ops.linear_passes import as_rows
from dsq.packing import quantize
from dsq.process_memory import resident
from dsq.skipped import SkippedModule, skipped_modules
from dsq.stash.controller import applied
from dsq.stash.meter import measure, reachable
from dsq.stash.policy import run_eagerly

#: timed runs of each model; the fastest counts, since other processes only slow a run
ROUNDS = 3
#: a step shorter than this is not compared: noise moved a toy's ratio between 1.5 and 9.6
MIN_SECONDS = 0.02


_MODES = {
    "simulation": "simulation: products are quantized",
    "saving": "saving: products are the trainer's, saved tensors are packed",
    "undecided": "simulation, unless the first training forward decides for saving (levels auto)",
}


@dataclass(frozen=True)
class Flops:
    """FLOPs of matrix products, two to a multiply-accumulate."""

    quantized: int
    floating_point: dict[str, int]  #: the others by operator, such as "aten.bmm" and "dsq.hadamard"

    @property
    def total(self) -> int:
        return self.quantized + sum(self.floating_point.values())

    @property
    def share(self) -> float:
        """Return the quantized share of all FLOPs; NaN where there are none."""
        return self.quantized / self.total if self.total else float("nan")


@dataclass(frozen=True)
class ConversionReport:
    """The result of ``dsq.report``; ``print`` shows a table, ``as_dict`` returns plain data."""

    forward: Flops
    backward: Flops | None  #: None if nothing needs a gradient
    layers: int  #: number of converted layers
    mode: str  #: "simulation" if products are quantized, "saving" if saved tensors alone are packed, "undecided"
    uncalled: tuple[str, ...]  #: converted layers whose forward never ran: something reads their weights instead
    mixed_scale: tuple[str, ...]  #: converted layers with features of mixed scale: most of them round to noise
    skipped: tuple[SkippedModule, ...]  #: modules with matrices that are not quantized, and why
    stash_bytes: int | None  #: saved for the backward; None if nothing needs a gradient
    unconverted_stash_bytes: int | None  #: the same before conversion
    seconds: float  #: of a forward, and its backward if anything needs a gradient, on this machine
    unconverted_seconds: float  #: the same before conversion
    seconds_spread: float  #: the slowest over the fastest of equal runs, the larger of the two models'
    gradient: GradientCheck | None  #: against the unquantized one; None if no parameter needs one
    small_flops: int = 0  #: FLOPs of the forward in products of several small matrices, which are faster unquantized
    graphs: str = ""  #: what compiled graphs save
    unpacked_bytes: dict[str, int] = field(default_factory=dict)  #: saved under a policy without a rule, by operation
    process: dict[str, int] = field(default_factory=resident)  #: "resident" and "peak" bytes after the report; on Linux

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as data for JSON."""
        return asdict(self) | {"gradient": self.gradient and self.gradient.as_dict()}

    def __str__(self) -> str:
        gradient = [] if self.gradient is None else [str(self.gradient)]
        lines = (
            self._flops_table(),
            *self._memory_lines(),
            self._time_line(),
            *gradient,
            *self._layer_lines(),
            *self._product_lines(),
        )
        return "\n".join([*lines, *self._skipped_lines()])

    def _flops_table(self) -> str:
        share_of = "packed" if self.mode == "saving" else "quantized"  # the operands, or the products
        rows = [
            {"pass": name, "GFLOP": flops.total / 1e9, share_of: flops.share, "others": _others(flops)}
            for name, flops in (("forward", self.forward), ("backward", self.backward))
            if flops is not None
        ]
        return table(rows, {"pass": "", "GFLOP": ".3f", share_of: ".1%", "others": ""})

    def _memory_lines(self) -> Iterator[str]:
        if self.stash_bytes is not None and self.unconverted_stash_bytes:
            share = self.stash_bytes / self.unconverted_stash_bytes
            before, after = self.unconverted_stash_bytes / 2**20, self.stash_bytes / 2**20
            yield f"saved for the backward: {before:.2f} MiB before, {after:.2f} MiB now ({share:.0%})"
            shares = {op: nbytes / self.stash_bytes for op, nbytes in self.unpacked_bytes.items()}
            if large := [f"{op} {share:.0%}" for op, share in shares.items() if share > 0.1]:
                yield f"  of it unpacked, by operations without a rule in dsq/stash/rules: {', '.join(large)}"
        if self.graphs:
            yield f"  {self.graphs}"
        if self.process:
            resident_mib, peak = (self.process[name] / 2**20 for name in ("resident", "peak"))
            yield f"process: {resident_mib:.0f} MiB resident, {peak:.0f} MiB at its peak, which includes the run before"

    def _time_line(self) -> str:
        before, after = 1e3 * self.unconverted_seconds, 1e3 * self.seconds
        if before < MIN_SECONDS * 1e3:
            return f"time of a step: too short to compare ({before:.2g} ms); give a batch of the training's size"
        spread = f"{after / before:.2f} x; equal runs differ by up to {self.seconds_spread:.2f} x"
        return f"time of a step: {before:.4g} ms before, {after:.4g} ms now ({spread})"

    def _layer_lines(self) -> Iterator[str]:
        yield f"layers: {self.layers} converted, {len(self.uncalled)} of them never called; {_MODES[self.mode]}"
        if not self.layers:
            yield "  call dsq.convert(model) or dsq.DynamicPrecision(model) before the report"
        for name in self.uncalled:
            yield f"  never called: {name}"
        if self.mixed_scale:
            yield "  features of mixed scale share blocks: standardize them, or give q0 more bits, in"
            yield f"    {', '.join(self.mixed_scale)}"

    def _product_lines(self) -> Iterator[str]:
        if self.small_flops:
            share = self.small_flops / self.forward.total
            yield f"  in floating point: {share:.1%} of the forward, several small products, which are faster so"
        if self.forward.floating_point.get("aten.bmm", 0) > self.small_flops:
            yield "  bmm, perhaps attention's products: attention=True beside your other options quantizes them, which"
            yield "    takes longer on a CPU (docs/report.md); functions outside of modules call dsq.functional.matmul"

    def _skipped_lines(self) -> Iterator[str]:
        names: dict[str, list[str]] = {}
        for entry in self.skipped:
            names.setdefault(entry.reason, []).append(entry.name or "(the model)")
        for reason, modules in names.items():
            yield f"  skipped: {_named(modules)}: {reason}"


def _named(modules: list[str]) -> str:
    """Return the names; of four or more the first, the last and the number."""
    return ", ".join(modules) if len(modules) < 4 else f"{modules[0]} to {modules[-1]}, {len(modules)} modules"


@trial()
def report(
    model: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] | None = None, **keywords: Any
) -> ConversionReport:
    """Run ``model(*inputs, **keywords)``; report how much of it is quantized, and the effect on its gradient.

    The model runs at most ten times as it is and nine times as before conversion, with its backward if anything needs
    a gradient. Parameters, ``.grad``, buffers and random numbers stay as they are. Attention is counted as its two
    products over all positions, whatever the mask. The seconds are the best of three runs; ``dsq-cost`` predicts those
    of other hardware. The gradient check (dsq/gradient_check.py) weights the result's tensors by fixed random numbers,
    because the gradient of a plain sum ends at a norm layer.

    Args:
        model: converted or not.
        *inputs: arguments of the model, or one batch whose keys are names of the forward's arguments, such as
            Hugging Face's. Unpack a batch that is a tuple: ``report(model, *batch)``.
        loss: computes the loss from the model's result. Default: ``result.loss`` (transformers), else the sum of the
            result's tensors.
    Returns:
        A ConversionReport.
    Raises:
        TypeError: ``model`` is no module, or ``loss`` is not callable.
    """
    layers = converted(model)
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the model's result, got {type(loss).__name__}")

    inputs, keywords = as_called(model, inputs, keywords)

    def run(total: Callable[[Tensor], Tensor] = torch.sum) -> Tensor | None:
        result = model(*inputs, **keywords)
        return _loss(result, total) if loss is None else loss(result)

    with undisturbed(model):
        uncalled, mixed_scale, forward, backward = _counted(layers, run, list(model.parameters()))
    stash_bytes = unconverted_bytes = None
    unpacked_bytes: dict[str, int] = {}
    if backward is not None:
        with undisturbed(model):
            stash = measure(run)
        stash_bytes = stash.nbytes
        unpacked_bytes = stash.exact if applied(model) else {}
        with undisturbed(model), as_unconverted(model):
            unconverted_bytes = measure(run).nbytes
    trained = backward is not None and any(p.requires_grad for p in model.parameters())
    gradient = compare(model, lambda: run(_randomly_weighted)) if trained else None
    return ConversionReport(
        *(forward, backward, len(layers), _mode(layers), uncalled, mixed_scale, skipped_modules(model)),
        *(stash_bytes, unconverted_bytes, *_best_seconds(model, run), gradient),
        small_flops=sum(getattr(layer, "small_flops", 0) for layer in layers.values()),
        graphs=getattr(applied(model).get("bfp"), "graph_summary", str)(),
        unpacked_bytes=unpacked_bytes,
    )


def _mode(layers: dict[str, Any]) -> str:
    if awaited(layers.values()):
        return "undecided"
    modes = {layer.quantizers.mode for layer in layers.values()}
    return "simulation" if "simulation" in modes else "saving"


def _counted(
    layers: dict[str, nn.Module], run: Callable[[], Tensor | None], parameters: list[nn.Parameter]
) -> tuple[tuple[str, ...], tuple[str, ...], Flops, Flops | None]:
    """Return the uncalled layers, those with features of mixed scale, and the FLOPs of the forward and the backward."""
    called: set[nn.Module] = set()
    losing: set[nn.Module] = set()

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        called.add(layer)
        if isinstance(layer, Linear) and args and _loses_features(layer, args[0]):
            losing.add(layer)

    hooks = [layer.register_forward_pre_hook(note) for layer in layers.values()]
    try:
        with run_eagerly(), sdpa_kernel(SDPBackend.MATH):  # the other kernels have no formula on a CPU
            (loss, forward), backward = _flops(run), None
            if loss is not None and loss.requires_grad:
                with without_gradients(parameters):
                    _, backward = _flops(loss.backward)
    finally:
        for hook in hooks:
            hook.remove()
    uncalled = tuple(name for name, layer in layers.items() if layer not in called)
    mixed_scale = tuple(name for name, layer in layers.items() if layer in losing)
    return uncalled, mixed_scale, forward, backward


@torch.no_grad()
def _loses_features(layer: Linear, x: Tensor) -> bool:
    """Return whether Q0 puts noise of a quarter of its variance on most of the features of ``x`` (..., K)."""
    fmt = layer.quantizers.q0
    if not fmt.packs or type(x) is not Tensor or x.numel() == 0:
        return False
    x_TK = as_rows(x).float()
    variance = x_TK.var(0, correction=0)
    noise = (quantize(x_TK, fmt) - x_TK).square().mean(0)
    return bool((noise > variance / 4)[variance > 0].float().mean() > 0.5)


def _best_seconds(model: nn.Module, run: Callable[[], Tensor | None]) -> tuple[float, float, float]:
    """Return the least seconds of a forward and backward of the model, the same before conversion, and the larger
    spread of the two.

    The two models run in turns.
    """
    converted_seconds, unconverted_seconds = [], []
    for _ in range(ROUNDS):
        converted_seconds.append(_seconds(model, run))
        with as_unconverted(model):
            unconverted_seconds.append(_seconds(model, run))
    spread = max(max(seconds) / min(seconds) for seconds in (converted_seconds, unconverted_seconds))
    return min(converted_seconds), min(unconverted_seconds), spread


def _seconds(model: nn.Module, run: Callable[[], Tensor | None]) -> float:
    """Return the seconds of the second of two runs: in the first kernels are chosen and code is compiled."""
    parameters = list(model.parameters())
    for _ in range(2):
        with undisturbed(model), without_gradients(parameters):
            start = wall_clock()
            loss = run()
            if loss is not None and loss.requires_grad:
                loss.backward()
            seconds = wall_clock() - start
    return seconds


def _grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the experts' products, one expert a token; PyTorch has no formula for them."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return int(2 * groups * a[-2] * a[-1] * b[-1])


class _NoModules(nullcontext[None]):
    """In place of PyTorch's tracker of modules, whose hooks fail in the forward of a reversible layer."""

    parents = frozenset({"Global"})


def _flops(run: Callable[[], Any]) -> tuple[Any, Flops]:
    """Return the result of ``run()``, and its FLOPs."""
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_flops})
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter:
        result = run()
    counts = {str(op): flops for op, flops in counter.get_flop_counts().get("Global", {}).items()}
    floating_point = {op: flops for op, flops in counts.items() if not op.startswith("dsq.") or op == "dsq.hadamard"}
    return result, Flops(sum(counts.values()) - sum(floating_point.values()), floating_point)


def _others(flops: Flops) -> str:
    total = flops.total or 1
    return ", ".join(f"{op.partition('.')[2]} {n / total:.1%}" for op, n in flops.floating_point.items() if n) or "none"


def _loss(result: Any, total: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return the tensor to differentiate."""
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [t for t in reachable(result) if t.is_floating_point() and t.requires_grad]
    return sum((total(t.float()) for t in floats), torch.zeros(())) if floats else None


def _randomly_weighted(t: Tensor) -> Tensor:
    """Return the sum of ``t`` times fixed random weights."""
    torch.manual_seed(0)
    return (t * torch.randn_like(t)).sum()
