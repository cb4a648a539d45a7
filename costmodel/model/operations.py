"""A workload as plain data: the matrix products and pointwise passes of one training step, with their shapes."""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from dsq.arguments import pattern
from dsq.command import read_toml

#: operation classes of the roofline (paper, table 7)
CLASSES = ("attention", "fc", "other")
#: tokens whose logits are there at once, where the loss is made in chunks
CHUNK = 1024
#: input of the layers that read the encoder
ENCODER_OUT = "encoder.out"
CPU_DROPOUT = "cpu dropout"
#: what fused kernels make of attention's scores, bytes each: the gradient of a learned bias, dropout's draws on a CPU
_SCORE_BYTES = {"bias": 4, CPU_DROPOUT: 1}
#: ends an input that comes in fp32 under autocast, though its maker's output does not
CAST = " (cast)"
_LAYER_NAMES: dict[str, list[str]] = read_toml(Path(__file__).with_name("layer_names.toml"))


@dataclass(frozen=True)
class TracedTensor:
    """A tensor that autograd saved for an operation while `dsq.workload.trace` ran the model."""

    role: str  #: its name in the operation's ledger ("x", "w", "y", "mask"); empty: a tensor that the ledger has not
    tensor: str  #: name of its storage: operations that save one storage save it once
    values: int  #: of the whole storage
    bits: int  #: of a value; 0: as wide as the container


@dataclass(frozen=True)
class Gemm:
    """y_MN = x_MK w_NK^T, `batch` times. Training adds dx_MK = dy_MN w_NK and dw_NK = dy_MN^T x_MK.

    A linear layer has batch 1, M tokens, K in-features, N out-features and a weight; attention's two products have
    activations on both sides and a batch of heads.
    """

    kind: ClassVar[str] = ""

    name: str
    M: int
    K: int
    N: int
    batch: int = 1
    cls: str = "fc"
    weight: bool = True  #: the second operand is a parameter (a linear layer), not an activation
    bias: bool = False
    tied: bool = False  #: the weight is counted elsewhere (a tied output projection)
    quantized: bool = True  #: a converted layer: q0..q3 apply; otherwise everything moves at the activation width
    input: str = ""  #: name of the input tensor; layers that share one stash it once
    x_grad: bool = True  #: the input needs a gradient (there is a dx GEMM)
    stream: bool = False  #: x is of the residual stream, which autocast keeps in fp32 and casts for each reader
    w_grad: bool = True  #: the second operand needs a gradient (there is a dw GEMM)
    recompute: int = 0  #: extra forward products the backward runs (fused attention recomputes its scores)
    pairs: int = 0  #: pairs of a row and a key that attention's mask leaves; 0: all. Only a fused kernel skips
    on_chip: str = ""  #: the one of "x", "y" that never reaches DRAM (fused attention's scores)
    weights: int = 1  #: weights alike, of which a row meets one (experts, the channels of a depthwise convolution)
    transposed: bool = False  #: the weight is stored (in, out), as transformers' Conv1D has it
    score_bytes: int = 0  #: bytes a score that a fused kernel of this attention makes for a while; see _SCORE_BYTES
    x_values: int = 0  #: values of x as stored, where rows overlap (a convolution) or it is a part; 0: M * K
    saves: tuple[TracedTensor, ...] | None = None  #: saved tensors as traced; None: those of the ledger

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one product; forward, dx and dw each cost this many."""
        if self.pairs and self.on_chip:
            return self.batch * self.pairs * (self.K if self.on_chip == "y" else self.N)
        return self.batch * self.M * self.K * self.N

    @property
    def container(self) -> str:
        """The width of attention that PyTorch writes out on a CPU, fp32; else empty."""
        return "state" if self.score_bytes and not self.on_chip else ""

    @property
    def matmuls(self) -> int:
        """Matrix products a training step runs: forward, dx, dw and any recomputation."""
        return 1 + self.x_grad + self.w_grad + self.recompute

    @property
    def trains(self) -> bool:
        """Whether the weight and the bias are updated."""
        return self.weight and self.w_grad

    @property
    def backward(self) -> bool:
        """Whether the product has a backward."""
        return self.x_grad or self.w_grad

    @property
    def parameters(self) -> int:
        weight = 0 if self.tied or not self.weight else self.K * self.N
        return self.weights * (weight + (self.N if self.bias else 0))


@dataclass(frozen=True)
class Pointwise:
    """A pass over a (rows, width) tensor that multiplies no matrices: a norm, softmax, activation, loss..."""

    input: ClassVar[str] = ""

    name: str
    kind: str  #: a key of ledger.POINTWISE
    rows: int
    width: int
    cls: str = "other"
    parameters: int = 0
    trained: bool = True  #: whether its parameters are updated
    mask: int = 0  #: values of the mask that it adds to attention's scores, the same in each layer
    bias: int = 0  #: values of the bias that it adds to them
    upcasts: bool = True  #: of softmax: it computes in fp32 whatever its input has, and keeps that result too
    backward: bool = True  #: there is one: it trains, or something before it does
    #: width that its tensors have in place of the container's: "state" (fp32), "r" (the residual stream's)
    container: str = ""
    saves: tuple[TracedTensor, ...] | None = None  #: saved tensors as traced; None: those of the ledger

    @property
    def trains(self) -> bool:
        return self.trained


Operation = Gemm | Pointwise


@dataclass(frozen=True)
class Workload:
    """One training step of a model: its operations in order, and where its shapes come from."""

    name: str
    operations: tuple[Operation, ...]
    tokens: int  #: tokens a step
    source: str = ""
    patches: int = 0  #: tokens of an image, where the input is images

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of the operations, computed once: caches ask for it often, and it has thousands of fields."""
        return hash(self.operations)

    @cached_property
    def parameters(self) -> int:
        return sum(op.parameters for op in self.operations)

    @cached_property
    def trained(self) -> int:
        """Parameters that the optimizer updates."""
        return sum(op.parameters for op in self.operations if op.trains)

    @property
    def gemms(self) -> list[Gemm]:
        return [op for op in self.operations if isinstance(op, Gemm)]

    @property
    def macs(self) -> int:
        """Multiply-accumulates of a training step, forward and backward; FLOPs are twice this."""
        return sum(g.macs * g.matmuls for g in self.gemms)

    def excluding(self, exclude: str) -> "Workload":
        """Return the workload with layers whose name matches the regex left unconverted. Raises ValueError."""
        named = layers_named("exclude", exclude)
        return self.changed(lambda op: isinstance(op, Gemm) and named(op.name), quantized=False)

    def converting_tied(self) -> "Workload":
        """Return the workload of dsq.convert(tied=True), whose tied output projection is converted too."""
        return self.changed(lambda op: isinstance(op, Gemm) and op.tied, quantized=True)

    def freezing(self, frozen: str) -> "Workload":
        """Return the workload with weights and biases of layers whose name matches the regex held as they are: no dw
        product, nothing saved for it, no update; and no backward at all before the first layer that trains. An
        embedding and the projection that is tied to it are one weight. Raises ValueError."""
        named, sizes = layers_named("freeze", frozen), {op.K * op.N for op in self.gemms if op.tied}
        layers = {op.name for op in self.operations if named(op.name)}
        tied = {op.name for op in self.operations if getattr(op, "tied", False) or op.parameters in sizes}
        layers |= tied if layers & tied else set()
        return self._training([_frozen(op) if op.name in layers else op for op in self.operations])

    def adapting(self, rank: int, layers: str, copies: bool = False, dropout: bool = False) -> "Workload":
        """Return the workload with LoRA (Hu et al., 2021): all is frozen, and each linear layer whose name matches the
        regex adds B_NR A_RK x, scaled, to its result. Raises ValueError where no layer matches.

        copies: each adapter keeps a copy of x of its own, as PEFT's do, which are fp32 and cast what they read;
            autocast, under which they train, makes the loss in fp32.
        dropout: each adapter reads what a dropout of its own leaves of x.
        """
        named, operations = layers_named("lora_layers", layers), []
        for op in self.operations:
            operations.append(_frozen(op))
            if isinstance(op, Gemm) and op.weight and op.weights == 1 and named(op.name):
                name = f"{op.name}.lora"
                source = f"{name}.x" if copies else op.input
                if dropout:
                    source = f"{name}_dropout"
                    operations.append(Pointwise(source, "dropout", op.M, op.K))
                operations.append(Gemm(f"{name}_A", op.M, op.K, rank, input=source, quantized=False))
                operations.append(Gemm(f"{name}_B", op.M, rank, op.N, input=f"{name}_A", quantized=False))
                operations.append(Pointwise(name, "adapter", op.M, op.N))
        if len(operations) == len(self.operations):
            linears = [op.name for op in self.operations if isinstance(op, Gemm) and op.weight]
            layer_names = ", ".join(dict.fromkeys(re.sub(r"\d+", "0", name, count=1) for name in linears))
            raise ValueError(f"lora_layers {layers!r} matches no linear layer of {self.name}: it has {layer_names}")
        adapted = self._training(operations)
        return adapted.changed(lambda op: op.kind == "loss", kind="loss of fp32") if copies else adapted

    def _training(self, operations: list[Operation]) -> "Workload":
        """Return the operations as a workload whose optimizer updates what trains, and whose backward ends there."""
        operations = _from_the_first_that_trains(operations)
        trained = sum(op.parameters for op in operations if op.trains)
        update = [replace(op, rows=trained) for op in operations if isinstance(op, Pointwise) and op.kind == "adam"]
        model = [op for op in operations if op.kind != "adam"]
        return replace(self, operations=(*model, *(update if trained else [])))

    def chunking_loss(self) -> "Workload":
        """Return the workload with logits made CHUNK tokens at a time, and their gradient at once (Liger-Kernel)."""
        return self._with_loss("chunked loss").changed(
            lambda op: isinstance(op, Gemm) and op.name == "output_projection", on_chip="y"
        )

    def fusing_loss(self) -> "Workload":
        """Return the workload with a loss of one kernel, which saves the logits in their own width (flash-attn's)."""
        return self._with_loss("fused loss")

    def _with_loss(self, kind: str) -> "Workload":
        # a cap of the logits is in the loss's kernel
        whole = replace(self, operations=tuple(op for op in self.operations if op.name != "logits.cap"))
        return whole.changed(lambda op: op.kind.startswith("loss"), kind=kind)

    def on_cpu(self) -> "Workload":
        """Return the workload as PyTorch runs it on a CPU, where a dropout keeps a mask of floats."""
        return self.changed(lambda op: op.kind == "dropout", kind=CPU_DROPOUT)

    def fusing_attention(self, cpu: bool = False) -> "Workload":
        """Return the workload with attention's scores left on chip and recomputed in the backward, as fused kernels do.

        cpu: by PyTorch's kernels for CPUs, which take neither dropout nor a learned bias: with these PyTorch writes
        attention out, in fp32. Its kernels for GPUs, and those of dsq.stash, take both.
        """
        operations: list[Operation] = []
        scores = False  # the last product between activations made scores, which the next one consumes
        score_bytes = defaultdict[str, int](int)
        for op in self.operations:
            score_bytes[_module(op)] += _SCORE_BYTES.get(op.kind, 0) * (op.cls == "attention")
        for index, op in enumerate(self.operations):
            written_out = score_bytes[_module(op)] if op.cls == "attention" else 0
            if isinstance(op, Gemm):
                op = replace(op, score_bytes=written_out) if written_out else op
                multiplies_activations = not op.weight and not op.on_chip and not (cpu and written_out)
                if multiplies_activations and scores:
                    op, scores = replace(op, on_chip="x"), False
                    if op.saves is not None:
                        op = replace(op, saves=(*op.saves, _saved_result(op, self.operations[index + 1 :])))
                elif multiplies_activations and _softmax_follows(self.operations[index + 1 :]):
                    op, scores = replace(op, on_chip="y", recompute=1), True
            elif cpu and written_out:
                op = replace(op, container="state")
            elif scores and op.kind == "bias":
                op = replace(op, mask=0, kind="fused bias", rows=op.bias // op.width)
            elif scores or op.kind in ("heads", "transposed", "mask"):
                # scaling, dropout, masking and softmax happen inside the fused kernel, which takes heads wherever they
                # lie, and needs no mask but its kind
                continue
            else:
                op = replace(op, mask=0, kind="fused bias" if op.kind == "zero bias" else op.kind)
            operations.append(op)
        return replace(self, operations=tuple(operations))

    def changed(self, where: Callable[[Operation], bool], **fields: Any) -> "Workload":
        """Return the workload with other ``fields`` in each operation for which ``where`` holds."""
        return replace(self, operations=tuple(replace(op, **fields) if where(op) else op for op in self.operations))

    @cached_property
    def groups(self) -> list["Group"]:
        """The operations with equal ones merged. A converted GEMM owns its stash if it is the first of its input."""
        inputs: set[tuple[str, int, int]] = set()
        grouped: dict[tuple[Any, ...], tuple[type[Operation], dict[str, Any], list[int]]] = {}
        for index, op in enumerate(self.operations):
            owner, facts = True, {**vars(op), "name": ""}
            facts["saves"] = op.saves and tuple(replace(saved, tensor="") for saved in op.saves)
            if isinstance(op, Gemm):
                facts["input"] = ""
                if op.input and op.quantized and op.w_grad:  # a frozen layer stashes nothing
                    owner = (op.input, op.M, op.K) not in inputs
                    inputs.add((op.input, op.M, op.K))
            grouped.setdefault((type(op), owner, *facts.values()), (type(op), facts, []))[2].append(index)
        names = [op.name for op in self.operations]
        return [
            Group(kind(**facts), key[1], tuple(members), tuple(names[index] for index in members))
            for key, (kind, facts, members) in grouped.items()
        ]


def layers_named(argument: str, names: str) -> Callable[[str], bool]:
    """Return whether a layer's name, or transformers' (layer_names.toml), matches a regex, or ends as one of a
    list "q_proj,v_proj" (PEFT's target_modules). Raises ValueError."""
    is_list = re.fullmatch(r"[\w.]+(, ?[\w.]+)+", names)
    regex = pattern(argument, rf"(^|\.)({'|'.join(re.split(', ?', names))})$" if is_list else names)

    def matches(name: str) -> bool:
        prefix, dot, last = name.rpartition(".")
        return any(regex.search(prefix + dot + word) for word in (last, *_LAYER_NAMES.get(last, [])))

    return matches


def _frozen(op: Operation) -> Operation:
    if isinstance(op, Gemm):
        return replace(op, w_grad=False) if op.weight else op
    return replace(op, trained=False) if op.parameters else op


def _from_the_first_that_trains(operations: list[Operation]) -> list[Operation]:
    """Return the operations; those before the first that trains have no backward."""
    trained = (index for index, op in enumerate(operations) if op.trains and (isinstance(op, Gemm) or op.parameters))
    first = next(trained, len(operations))
    start = operations[first : first + 1]
    # tensors that need no gradient: what the first of them reads, and an encoder's output where nothing in it trains
    inputs = {op.input for op in start} - {""}
    inputs |= set() if any(op.name.startswith("encoder.") for op in start) else {ENCODER_OUT}

    def without_gradient(index: int, op: Operation) -> Operation:
        if isinstance(op, Gemm):
            op = replace(op, x_grad=False) if index <= first or op.input in inputs else op
            return replace(op, w_grad=False, recompute=0) if index < first else op
        return replace(op, backward=False) if index < first and op.kind != "tied" else op

    return [without_gradient(index, op) for index, op in enumerate(operations)]


def _softmax_follows(operations: tuple[Operation, ...]) -> bool:
    """Return whether a softmax comes before the next matrix product."""
    return next((op.kind == "softmax" for op in operations if isinstance(op, Gemm) or op.kind == "softmax"), False)


def _saved_result(context: Gemm, following: tuple[Operation, ...]) -> TracedTensor:
    """Return the result that fused attention saves: the tensor that the next layer of a trace saves as its input."""
    values = context.batch * context.M * context.N
    layer = next((op for op in following if isinstance(op, Gemm) and op.weight), None)
    inputs = [saved for saved in (layer.saves or () if layer else ()) if saved.role == "x" and saved.values == values]
    return replace(inputs[0], role="y") if inputs else TracedTensor("y", f"{context.name} y", values, 0)


def _module(op: Operation) -> str:
    return op.name.rpartition(".")[0]


@dataclass(frozen=True)
class Group:
    """Operations that differ in their names alone."""

    operation: Operation  #: one of them, without its name
    owner: bool  #: whether it stashes its input: a product that is the first to read it
    members: tuple[int, ...]  #: their indices in the workload
    names: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.members)
