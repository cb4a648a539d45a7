"""Compare the gradient of a quantized model with the unquantized one, on one batch and with the same dropout.

    g  gradient without quantization    q  as the model trains    s  with quantized saved tensors, unquantized products
    error = |q - g| / |g|    of_stash = |s - g| / |g|    cosine = <q, g> / (|q| |g|)    ratio = |q| / |g|

Without quantization, every converted layer has 32 bits and every stash policy is suspended. All passes draw the same
random numbers.
"""

import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsq.conversion import converted
from dsq.first_training import trial
from dsq.layers.own_products import set_watches, watches
from dsq.stash.controller import applied, suspend
from dsq.stash.policy import run_eagerly

_CHUNK = 1 << 20  #: values that are summed in float64 at a time, so that no gradient is copied as a whole


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the figures of a GradientCheck; the module's docstring defines them."""

    error: float
    of_stash: float
    cosine: float  #: least of a parameter
    ratio: float  #: of a parameter's norms, at most; its reciprocal, at least


# From a transformer on Multi30k (docs/report.md), where bf16 autocast has error .01 to .04 and cosines from .998:
#: [8,4,4,8] (error to .29, of the stash .05, cosine .80) trains as bf16 autocast does. A Llama whose output projection
#: is its own lost .07 nats at [8,4,4,8], with cosines of .63 to .74. A stash of 4 bits moves the gradient of a model
#: that has trained, mostly noise, by .06 to .11 and costs nothing; policy gact at .14 lost .026 nats on Multi30k
FINE_LIMITS = Limits(error=0.35, of_stash=0.12, cosine=0.8, ratio=3.0)
#: [4,3,3,8] (error to .60, cosine .45) trains and loses a little; [2,2,2,2] (2.3, 0, ratio 8) does not
USABLE_LIMITS = Limits(error=0.8, of_stash=0.8, cosine=0.3, ratio=10.0)
#: a parameter with a smaller share of the gradient is not judged: it is rounding noise, as in attention's key bias
MIN_JUDGED_SHARE = 1e-4
#: a parameter with fewer values, such as a last bias, is not judged: its gradient is near 0 by chance in some batches
MIN_JUDGED_VALUES = 4


@dataclass(frozen=True)
class ParameterGradient:
    """The comparison of one parameter's gradient; figures are NaN if a gradient is not finite."""

    name: str
    share: float  #: |g| of the parameter over |g| of the model
    error: float
    cosine: float
    ratio: float
    values: int  #: the parameter's size

    @property
    def judged(self) -> bool:
        """Return whether the gradient stands out from rounding noise and from chance, or is not finite."""
        return math.isnan(self.error) or (self.values >= MIN_JUDGED_VALUES and not self.share < MIN_JUDGED_SHARE)

    def exceeds(self, limits: Limits) -> bool:
        """Return whether the parameter is judged and a figure exceeds ``limits``."""
        return self.judged and not (self.cosine >= limits.cosine and 1 / limits.ratio <= self.ratio <= limits.ratio)

    def __str__(self) -> str:
        norms = f"norm x {self.ratio:.3g}, share {self.share:.2g}"
        return f"{self.name}: error {self.error:.3g}, cosine {self.cosine:.3g}, {norms}"


@dataclass(frozen=True)
class GradientCheck:
    """The comparison of a model's gradient; ``print`` shows the verdict and the five worst parameters."""

    error: float  #: |q - g| / |g|
    of_stash: float  #: |s - g| / |g|, the part of the error that comes from the saved tensors
    parameters: tuple[ParameterGradient, ...]  #: largest error first; those that are not judged come last
    # of two more runs without quantization, made if the grade is not "fine"
    of_loss: float = 0.0  #: the error between two equal runs
    of_bfloat16: float = 0.0  #: the error if weights are rounded to bfloat16

    @property
    def cosine(self) -> float:
        """Return the least cosine of the judged parameters; NaN if a gradient is not finite."""
        cosines = [p.cosine for p in self.parameters if p.judged]
        return math.nan if any(map(math.isnan, cosines)) else min(cosines, default=1.0)

    @property
    def grade(self) -> str:
        """Return "fine", "doubtful" or "broken"."""
        return "broken" if self._exceeded(USABLE_LIMITS) else "doubtful" if self._exceeded(FINE_LIMITS) else "fine"

    @property
    def verdict(self) -> str:
        """Return one line: the grade, the figures, and the exceeded limits with a remedy."""
        reasons = self._exceeded(USABLE_LIMITS) or self._exceeded(FINE_LIMITS)
        if self.of_loss > self.error / 4:
            reasons.insert(0, f"loss() itself moves it by {self.of_loss:.3g}: let it run the same batch at each call")
        elif self.error > FINE_LIMITS.error and self.of_bfloat16 > self.error / 4:  # as in deep networks at first
            reasons.insert(0, f"weights rounded to bfloat16 move it by {self.of_bfloat16:.3g}: check again later")
        figures = f"error {self.error:.3g}, {self.of_stash:.3g} by the stash alone, worst cosine {self.cosine:.3g}"
        return "; ".join([f"gradient {self.grade}: {figures}", *reasons])

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self) | {"cosine": self.cosine, "grade": self.grade, "verdict": self.verdict}

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"  {p}" for p in self.parameters[:5])])

    def _exceeded(self, limits: Limits) -> list[str]:
        """Return a text for each exceeded limit."""
        if infinite := [p for p in self.parameters if math.isnan(p.error)]:
            cause = " without quantization either" if any(math.isnan(p.share) for p in infinite) else ""
            return [f"the gradient of {infinite[0].name} is not finite{cause}"]
        exceeded = [] if self.error <= limits.error else [f"error over {limits.error:g}: raise q0 and q2"]
        exceeded += [] if self.of_stash <= limits.of_stash else [f"the stash's over {limits.of_stash:g}: raise q1"]
        return exceeded + [str(p) for p in self.parameters if p.exceeds(limits)][:1]


@trial()
def compare(model: nn.Module, loss: Callable[[], Tensor | None]) -> GradientCheck:
    """Compare the gradient of ``loss()``, which runs ``model``, with the unquantized one.

    The loss runs twice, three times if the model has converted layers, and twice more if the grade is not "fine". This
    takes the memory of an unquantized step, one more set of gradients and one of weights. Random numbers, buffers,
    ``.grad`` and states of policies are restored. Raises TypeError if the loss is not a single value that requires a
    gradient.
    """
    layers = list(converted(model).values())
    with suspend(), at_32_bits(layers):
        unquantized = gradients(model, loss)
    error, parameters = _compared(unquantized, gradients(model, loss))
    of_stash = error
    if layers:
        with at_32_bits(layers, but_stash=True):
            of_stash = _compared(unquantized, gradients(model, loss))[0]
    check = GradientCheck(error, of_stash, parameters)
    if check.grade != "fine":
        with suspend(), at_32_bits(layers):
            of_loss = _compared(unquantized, gradients(model, loss))[0]
            with in_bfloat16([p for p in model.parameters() if p.is_floating_point()]):
                of_bfloat16 = _compared(unquantized, gradients(model, loss))[0]
        check = replace(check, of_loss=of_loss, of_bfloat16=of_bfloat16)
    return check


def _compared(
    unquantized: dict[str, Tensor], quantized: dict[str, Tensor]
) -> tuple[float, tuple[ParameterGradient, ...]]:
    """Return the error of the whole gradient, and the parameters; a gradient that one side lacks is zero."""
    sums, sizes = {}, {}
    for name, like in (unquantized | quantized).items():
        g, q = (side[name] if name in side else torch.zeros_like(like) for side in (unquantized, quantized))
        sums[name], sizes[name] = _sums(g, q), like.numel()
    norm, error = (math.sqrt(sum(squares[i] for squares in sums.values())) for i in (0, 3))
    parameters = [ParameterGradient(name, *_figures(norm, *squares), sizes[name]) for name, squares in sums.items()]
    parameters.sort(key=lambda p: (not p.judged, -math.inf if math.isnan(p.error) else -p.error))
    return _over(error, norm), tuple(parameters)


def _sums(g: Tensor, q: Tensor) -> list[float]:
    """Return <g, g>, <q, q>, <g, q> and |q - g|^2, in float64.

    Those of a DTensor are equal on all ranks, which decide by them whether to run the loss again.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=g.device)
    for x, y in zip(_flat(g).split(_CHUNK), _flat(q).split(_CHUNK), strict=True):
        x, y = x.double(), y.double()
        sums += torch.stack([x @ x, y @ y, x @ y, (y - x).square().sum()])
    for axis, placement in enumerate(getattr(g, "placements", ())):
        if placement.is_shard():
            torch.distributed.all_reduce(sums, group=g.device_mesh.get_group(axis))  # type: ignore[attr-defined]
    return sums.tolist()


def _flat(x: Any) -> Tensor:
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local.to_dense().flatten()


def _figures(norm: float, gg: float, qq: float, gq: float, dd: float) -> tuple[float, float, float, float]:
    """Return the share, error, cosine and ratio of a parameter."""
    share = _over(math.sqrt(gg), norm) if math.isfinite(gg) else math.nan
    if not math.isfinite(gg + qq):
        return share, math.nan, math.nan, math.nan
    cosine = gq / math.sqrt(gg * qq) if gg * qq else float(gg == qq)
    return share, _over(dd**0.5, gg**0.5), cosine, _over(qq**0.5, gg**0.5, both_zero=1.0)


def _over(a: float, b: float, both_zero: float = 0.0) -> float:
    return a / b if b else (math.inf if a else both_zero)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore buffers, random numbers (some models of transformers draw NumPy's) and states of policies at the end."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    policies = [controller for module in model.modules() for controller in applied(module).values()]
    states = [controller.state_dict() for controller in policies]
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        if numpy and numpy_state:
            numpy.random.set_state(numpy_state)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for controller, state in zip(policies, states, strict=True):
            controller.load_state_dict(state)


@contextmanager
def unwatched(model: nn.Module) -> Iterator[None]:
    """Restore at the end what decides which forwards of modules with matrices of their own are watched."""
    before = watches(model)
    try:
        yield
    finally:
        set_watches(model, before)


@contextmanager
def without_gradients(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Set ``.grad`` to None, and restore it at the end. Hooks after accumulation, such as an optimizer's, do not run.

    torch.autograd.grad is no substitute: the counter of FLOPs does not see it, and FSDP and reentrant checkpoints do
    not allow it.
    """
    gradients = [p.grad for p in parameters]
    tables = [t for p in parameters if (t := p._post_accumulate_grad_hooks)]
    hooks = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        for p in parameters:
            p.grad = None
        yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        for table, before in zip(tables, hooks, strict=True):
            table.update(before)


def gradients(model: nn.Module, loss: Callable[[], Tensor | None]) -> dict[str, Tensor]:
    """Return the gradients of ``loss()`` by parameter. Blocks run eagerly: compiled code draws another dropout."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with undisturbed(model), unwatched(model), run_eagerly(), without_gradients(list(parameters.values())):
        start = loss()
        if not isinstance(start, Tensor) or start.numel() != 1 or not start.requires_grad:
            shape = f" of shape {tuple(start.shape)}" if isinstance(start, Tensor) else ""
            scalar = isinstance(start, Tensor) and start.dim() == 0
            cure = "; is the model frozen, or called under torch.no_grad()?" if scalar else ""
            got = f"{type(start).__name__}{shape}{cure}"
            raise TypeError(f"loss() must return one value that requires a gradient, got {got}")
        start.backward()
        results = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return {name: g.clone() if g._is_view() else g for name, g in results.items()}  # views of DDP's buckets


@contextmanager
def in_bfloat16(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Round parameters to bfloat16, and restore them at the end; graphs from before stay valid."""
    before = [p.detach().clone() for p in parameters]
    try:
        for p in parameters:
            p.data.copy_(p.data.bfloat16())  # ``data`` counts no version
        yield
    finally:
        for p, weights in zip(parameters, before, strict=True):
            p.data.copy_(weights)


@contextmanager
def at_32_bits(layers: list[Any], but_stash: bool = False) -> Iterator[None]:
    """Let converted layers multiply in full precision, by their quantized saved tensors if ``but_stash``.

    They go on drawing the seeds of their rounding, so that dropout stays the same.
    """
    before = [layer.quantizers for layer in layers]
    try:
        for layer, q in zip(layers, before, strict=True):
            layer.quantizers = q.unquantized(but_stash)
        yield
    finally:
        for layer, q in zip(layers, before, strict=True):
            layer.quantizers = q
