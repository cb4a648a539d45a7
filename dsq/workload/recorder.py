"""The operations of a forward: hooks see its linear layers, a dispatch mode all others. Products are recorded by their
sizes, other operations as passes over their tensors.

Shape suffixes: B batch, M rows, K the contraction, N columns; T tokens, E experts; C channels, O out-channels; of
attention H heads, L queries, G groups of heads, S keys, D features, E features of a value.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dsq.conversion import converted, quantized_class
from dsq.skipped import embedded

aten = torch.ops.aten
Entry = dict[str, Any]
#: (recorder, name of the call, its arguments, its result): what enters the call
RecordOp = Callable[["Recorder", str, Any, Any], None]


class Recorder(TorchDispatchMode):
    """Records nn.Linear calls from their hooks, and those of OPERATIONS dispatched outside them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Entry] = []
        # a storage's _cdata is its identity on the meta device too, where every address is 0
        self._names = {p.untyped_storage()._cdata: name for name, p in model.named_parameters()}
        self._modules = {module: name for name, module in model.named_modules()}
        self._counted: set[tuple[int, int]] = set()  # (storage, offset) of parameters some operation owns
        layers = list(converted(model).values())
        #: whether attention's two products are quantized
        self.quantized_attention = any(layer.conversion.get("attention", False) for layer in layers)
        tables = set() if layers else embedded(model)
        layers = layers or [module for module in model.modules() if quantized_class(module)]
        parameters = [p for layer in layers for p in layer.parameters(recurse=False) if id(p) not in tables]
        self._quantized = {p.untyped_storage()._cdata for p in parameters}
        self._scopes: list[str] = []
        self._inside_linear = 0
        self._inputs: list[ReferenceType[Tensor]] = []  # a step described in a run must not keep what that packs
        self._calls = Counter[str]()
        #: storages in the order in which they were first saved; a weak reference keeps an address from being used again
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}
        self._existing = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._references = list[StorageWeakRef]()  # so that no address is used again
        self._pending: list[Saved] = []
        self._roles: dict[int, tuple[Entry, str]] = {}  # of the storages of the latest operation's tensors
        self._owners: dict[int, tuple[Entry, str]] = {}  # of masks and losses: who saves them later saves nothing new
        self._results: set[int] = set()  # storages of the latest operation's results
        self._latest: Entry | None = None

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Count no storage of ``tensors`` as saved: the batch is there before the step."""
        self._references += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._existing |= {reference.cdata for reference in self._references}

    def saving(self) -> saved_tensors_hooks:
        """Return hooks that record each tensor that autograd saves, and save nothing: there is no backward."""
        nothing = torch.empty(0)

        def pack(tensor: Tensor) -> Tensor:
            if tensor.layout is torch.strided and storage_of(tensor) not in self._existing:
                saved = self._saved(tensor)
                # autograd saves an operation's inputs before it runs, and its results, detached, after it
                if not tensor.requires_grad and saved.storage in self._results and not self._inside_linear:
                    self._attach([saved], self._latest)
                else:
                    self._pending.append(saved)
            return nothing

        return saved_tensors_hooks(pack, lambda packed: packed)

    def _saved(self, tensor: Tensor) -> "Saved":
        storage = tensor.untyped_storage()
        index, _ = self._storages.setdefault(storage._cdata, (len(self._storages), StorageWeakRef(storage)))
        bits = 0 if tensor.is_floating_point() else 8 * tensor.element_size()
        return Saved(storage._cdata, f"storage {index}", storage.nbytes() // tensor.element_size(), bits)

    def _attach(self, tensors: "list[Saved]", entry: Entry | None) -> None:
        """Write saved tensors into the entries whose operands they are, else into ``entry``."""
        for saved in tensors:
            owner, role = self._owners.get(saved.storage) or self._roles.get(saved.storage) or (entry, "")
            if owner is not None and "saves" in owner:
                record = [role, saved.name, saved.values, saved.bits]
                if record not in owner["saves"]:
                    owner["saves"].append(record)

    def set_roles(self, entry: Entry, roles: dict[str, Any], owned: bool = False) -> None:
        """Name the saved tensors of an operation by the names that they have in the ledger.

        owned: whoever saves them later saves what this operation saves (a mask that is drawn, and multiplied with).
        """
        named = {storage_of(tensor): (entry, role) for role, tensor in roles.items() if isinstance(tensor, Tensor)}
        if owned:
            self._references += [StorageWeakRef(x.untyped_storage()) for x in roles.values() if isinstance(x, Tensor)]
        (self._owners if owned else self._roles).update(named)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """While inside, the modules of the model tell which of them runs."""
        handles: list[Any] = [m.register_forward_pre_hook(self._enter, with_kwargs=True) for m in self._modules]
        handles += [m.register_forward_hook(self._leave, always_call=True) for m in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._scopes.append(self._modules[module])
        if isinstance(module, nn.Linear):
            self._roles, self._results = {}, set()
            self._linear(self._modules[module], module, args[0] if args else keywords["input"])
            self._inside_linear += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._scopes.pop()
        if isinstance(module, nn.Linear):
            self._inside_linear -= 1
            self._attach(self._pending, self._latest)
            self._pending = []

    def _linear(self, name: str, module: nn.Linear, x: Tensor) -> None:
        source = next((i for i, reference in enumerate(self._inputs) if reference() is x), len(self._inputs))
        if source == len(self._inputs):
            self._inputs.append(ref(x))
        entry = self.add_gemm(
            name,
            (1, x.numel() // x.shape[-1], module.in_features, module.out_features),
            weight=module.weight,
            bias=module.bias,
            input=f"tensor {source}",
            x_grad=x.requires_grad,
            w_grad=module.weight.requires_grad,
        )
        self.set_roles(entry, {"x": x})

    def add_gemm(
        self,
        name: str,
        size: tuple[int, int, int, int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        **fields: Any,
    ) -> Entry:
        """Record one product of (batch, M, K, N); `weight` the parameter on its right side, if it is one."""
        batch, rows, width, outputs = size
        tied = weight is not None and not self.own(weight)
        quantized = self.quantized_attention if weight is None else weight.untyped_storage()._cdata in self._quantized
        own_bias = bias is not None and self.own(bias)
        entry = {"op": "gemm", "name": name, "batch": batch, "M": rows, "K": width, "N": outputs}
        kind = {"weight": weight is not None, "bias": own_bias, "tied": tied, "quantized": quantized}
        return self._append(entry | kind | {"cls": "attention" if weight is None else "fc"} | fields)

    def _append(self, entry: Entry) -> Entry:
        self._latest = entry | {"saves": []}
        self.operations.append(self._latest)
        return self._latest

    def add_pass(
        self, name: str, kind: str, rows: int, width: int, cls: str = "other", parameters: int = 0, trained: bool = True
    ) -> Entry:
        """Record one pass over (rows, width) values, of a ``kind`` that the cost model knows."""
        entry = {"op": "pointwise", "name": name, "kind": kind, "rows": rows, "width": width}
        return self._append(entry | {"cls": cls, "parameters": parameters, "trained": trained})

    def own(self, parameter: Tensor) -> bool:
        """Count the parameter unless some operation has; True if it was new."""
        key = (parameter.untyped_storage()._cdata, int(parameter.storage_offset()))
        is_new = key not in self._counted
        self._counted.add(key)
        return is_new

    def is_parameter(self, tensor: Any) -> bool:
        """Return whether ``tensor`` is a parameter of the model, or a view of one."""
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._names

    def named(self, tensor: Tensor, otherwise: str) -> tuple[str, Tensor | None]:
        """Return the name of the parameter that ``tensor`` is, and it; ``otherwise`` and None for what is none."""
        name = self._names.get(tensor.untyped_storage()._cdata)
        return (otherwise, None) if name is None else (name, tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _run(func, args, kwargs or {})
        if self._inside_linear:
            return out
        saved, self._pending, self._roles = self._pending, [], {}
        record, count = OPERATIONS.get(func.overloadpacket), len(self.operations)
        if record:
            record(self, self._call(func), args, out)
        if saved and len(self.operations) == count:
            _record_pass("elementwise")(self, self._call(func), args, out)
        self._attach(saved, self._latest)
        if len(self.operations) > count:
            results = out if isinstance(out, (tuple, list)) else (out,)
            self._results = {storage_of(result) for result in results if isinstance(result, Tensor)}
        return out

    def _call(self, func: Any) -> str:
        """Return the name of a call, which no other call has."""
        scope = self._scopes[-1] if self._scopes else ""
        name = f"{scope}.{func.overloadpacket.__name__}".lstrip(".")
        self._calls[name] += 1
        return name if self._calls[name] == 1 else f"{name}_{self._calls[name]}"


class Saved(NamedTuple):
    """A tensor that autograd saves."""

    storage: int
    name: str
    values: int  #: of its storage
    bits: int  #: of a value; 0: a float


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what ``func`` returns. On the meta device grouped products take 16 bits alone: elsewhere fp32 too."""
    if func.overloadpacket is aten._grouped_mm and args[0].is_meta and args[0].dtype is torch.float32:
        return func(*(x.bfloat16() for x in args[:2]), *args[2:], **kwargs).float()
    return func(*args, **kwargs)


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


# ---- the entry of each operation


def _product(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
    """bias + a_BMK b_BKN, either of which may lack the batch axis, or a_BMK b_BKN alone. Of a parameter b each matrix
    multiplies rows of its own: those of one expert."""
    *biases, a, b = args
    bias = biases[0] if biases and recorder.is_parameter(biases[0]) else None
    batch, rows, width = a.shape if a.dim() == 3 else (1, *a.shape)
    name, weight = recorder.named(b, name)
    fields = {"x_grad": a.requires_grad, "w_grad": b.requires_grad}
    if weight is not None and batch > 1:
        fields["weights"] = batch if b.stride(0) else 1  # one matrix may be expanded
        batch, rows = 1, batch * rows
    entry = recorder.add_gemm(name, (batch, rows, width, b.shape[-1]), weight, bias, **fields)
    recorder.set_roles(entry, {"x": a, "w": b})


def _experts(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
    """x_TK b_EKN: each row by the matrix of one expert."""
    x, b = args[:2]
    name, weight = recorder.named(b, name)
    fields = {"weights": b.shape[0], "x_grad": x.requires_grad, "w_grad": b.requires_grad}
    recorder.set_roles(recorder.add_gemm(name, (1, *x.shape, out.shape[-1]), weight, **fields), {"x": x})


def _convolution(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
    """x_BC..., w_OC...: a product of its patches (positions, channels * kernel), each group of channels by itself."""
    x, w, bias, groups = args[0], args[1], args[2], args[8]
    transposed, kernel = args[6], math.prod(w.shape[2:])
    rows = x.shape[0] * math.prod((x if transposed else out).shape[2:])
    channels, outputs = x.shape[1] // groups, out.shape[1] // groups
    width, outputs = (channels, outputs * kernel) if transposed else (channels * kernel, outputs)
    name, weight = recorder.named(w, name)
    entry = recorder.add_gemm(
        name,
        (1, rows * groups, width, outputs),
        weight,
        bias if recorder.is_parameter(bias) and not transposed else None,
        weights=groups,
        x_values=x.numel(),
        x_grad=x.requires_grad,
        w_grad=w.requires_grad,
    )
    recorder.set_roles(entry, {"x": x})


def _fused_attention(recorder: Recorder, name: str, args: Any, out: Any) -> None:
    """q_BHLD, k_BGSD, v_BGSE: two products whose scores stay on chip and are recomputed in the backward. Quantized,
    they are dsq.ops.products.attention, which stores the scores."""
    q, k, v = args[:3]
    batch, heads, length, depth = q.shape
    groups, keys = k.shape[1], k.shape[2]
    grads = {"x_grad": q.requires_grad}
    size = (batch * groups, length * (heads // groups))
    fused = not recorder.quantized_attention
    scores: Entry = {"w_grad": k.requires_grad} | ({"on_chip": "y", "recompute": 1} if fused else {})
    first = recorder.add_gemm(f"{name}.scores", (*size, depth, keys), **grads, **scores)
    entries = [first]
    for kind in () if fused else ("scale", "softmax"):
        entries.append(recorder.add_pass(f"{name}.{kind}", kind, math.prod(size), keys, "attention"))
    context: Entry = {"w_grad": v.requires_grad} | ({"on_chip": "x"} if fused else {})
    second = recorder.add_gemm(f"{name}.context", (*size, keys, v.shape[-1]), **grads, **context)
    if fused:
        recorder.set_roles(first, {"x": q, "w": k, "logsumexp": out[1]})
        recorder.set_roles(second, {"w": v, "y": out[0]})
    else:  # the step that is described is not the one that runs
        for entry in (*entries, second):
            del entry["saves"]


def _record_pass(kind: str, cls: str = "other", saves: str = "", result: str = "", owned: bool = False) -> RecordOp:
    """Return what records a pass of a kind; ``saves`` and ``result``: the ledger's names of its input and its output,
    where it saves them."""

    def record(recorder: Recorder, name: str, args: Any, out: Any) -> None:
        results = out if isinstance(out, (tuple, list)) else (out,)
        y = next((result for result in results if isinstance(result, Tensor)), args[0])
        width = max(1, y.shape[-1]) if y.dim() else 1
        entry = recorder.add_pass(name, kind, max(1, y.numel() // width), width, cls)
        recorder.set_roles(entry, {saves: args[0]} if saves else {result: y} if result else {}, owned)

    return record


def _norm(recorder: Recorder, name: str, args: Any, out: Any) -> None:
    x, shape = args[:2]
    affine = [p for p in args[2:4] if recorder.is_parameter(p)]
    owned = sum(p.numel() for p in affine if recorder.own(p))
    width, trained = math.prod(shape), not affine or any(p.requires_grad for p in affine)
    entry = recorder.add_pass(name, "norm", x.numel() // width, width, parameters=owned, trained=trained)
    *mean, deviation = out[1:]
    recorder.set_roles(entry, {"x": x, "1 / deviation": deviation} | ({"mean": mean[0]} if mean else {}))


def _embedding(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
    table, ids = args[:2]
    owned = table.numel() if recorder.is_parameter(table) and recorder.own(table) else 0
    trained = bool(table.requires_grad)
    recorder.add_pass(name, "embedding", ids.numel(), table.shape[1], parameters=owned, trained=trained)


def _sum(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
    """x + f(x), both activations of one shape; a bias or a mask is no residual."""
    a, b = args[:2]
    if isinstance(b, Tensor) and a.shape == b.shape and a.dim() > 1 and b.requires_grad:
        _record_pass("residual")(recorder, name, args, out)


def _times(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
    """Record a product of two activations; dropout's mask is none, and recorded where it is drawn."""
    a, b = args[:2]
    if isinstance(b, Tensor) and a.shape == b.shape and a.requires_grad and b.requires_grad:
        _record_pass("product")(recorder, name, args, out)
        recorder.set_roles(recorder.operations[-1], {"a": a, "b": b})


def _dropout(recorder: Recorder, name: str, args: Any, out: Any) -> None:
    """Record a GPU's own operator, of x; elsewhere the mask, which is drawn into a tensor like x."""
    _record_pass("dropout")(recorder, name, args, args[0])
    mask = out[1] if isinstance(out, tuple) else args[0]
    recorder.set_roles(recorder.operations[-1], {"mask": mask}, owned=True)


#: what enters a call, by operator
OPERATIONS: dict[Any, RecordOp] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm), _product),
    aten._grouped_mm: _experts,
    aten.convolution: _convolution,
    **{
        getattr(aten, f"_scaled_dot_product_{kind}"): _fused_attention
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    },
    **dict.fromkeys((aten._softmax, aten._safe_softmax), _record_pass("softmax", "attention", result="y")),
    aten.masked_fill: _record_pass("scale", "attention"),
    **dict.fromkeys((aten.native_dropout, aten.bernoulli_), _dropout),
    aten._log_softmax: _record_pass("loss", result="log p", owned=True),
    **dict.fromkeys((aten.native_layer_norm, aten._fused_rms_norm), _norm),
    aten.embedding: _embedding,
    aten.add: _sum,
    aten.mul: _times,
    aten.relu: _record_pass("relu", result="y"),
    **dict.fromkeys((aten.gelu, aten.silu, aten.leaky_relu), _record_pass("activation", saves="x")),
    **dict.fromkeys((aten.tanh, aten.sigmoid), _record_pass("activation", result="x")),
}
