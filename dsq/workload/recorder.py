"""The operations of a forward, seen by hooks on its linears and by a dispatch mode for all else."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsq.conversion import converted, quantised_class
from dsq.left_plain import embedded

Entry = dict[str, Any]
#: (recorder, name of the call, its arguments, its result): what enters the call
RecordOp = Callable[["Recorder", str, Any, Any], None]


class Recorder(TorchDispatchMode):
    """Records nn.Linear calls from their hooks, and the operations dispatched outside them.

    known: by operator, what enters its call in ``operations``; calls of others are not recorded.
    """

    def __init__(self, model: nn.Module, known: Mapping[Any, RecordOp]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Entry] = []
        self._known = known
        # a storage's _cdata is its identity on the meta device too, where every address is 0
        self._names = {p.untyped_storage()._cdata: name for name, p in model.named_parameters()}
        self._counted: set[tuple[int, int]] = set()  # (storage, offset) of parameters some operation owns
        layers = list(converted(model).values())
        #: whether attention's two products are quantised
        self.quantised_attention = any(layer.conversion.get("attention", False) for layer in layers)
        tables = set() if layers else embedded(model)
        layers = layers or [module for module in model.modules() if quantised_class(module)]
        own = [p for layer in layers for p in layer.parameters(recurse=False) if id(p) not in tables]
        self._quantised = {p.untyped_storage()._cdata for p in own}
        self._scopes: list[str] = []
        self._inside_linear = 0
        self._inputs: list[Tensor] = []  # alive until the end, so that an id names one tensor

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """While inside, the modules of ``model`` tell which of them runs."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self._scopes.append(name)
            if isinstance(module, nn.Linear):
                self._linear(name, module, args[0] if args else keywords["input"])
                self._inside_linear += 1

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._scopes.pop()
        if isinstance(module, nn.Linear):
            self._inside_linear -= 1

    def _linear(self, name: str, module: nn.Linear, x: Tensor) -> None:
        source = next((i for i, known in enumerate(self._inputs) if known is x), len(self._inputs))
        if source == len(self._inputs):
            self._inputs.append(x)
        self.add_gemm(
            name,
            (1, x.numel() // x.shape[-1], module.in_features, module.out_features),
            weight=module.weight,
            bias=module.bias,
            input=f"tensor {source}",
            x_grad=x.requires_grad,
            w_grad=module.weight.requires_grad,
        )

    def add_gemm(
        self,
        name: str,
        size: tuple[int, int, int, int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        **fields: Any,
    ) -> None:
        """Record one product of (batch, M, K, N); `weight` the parameter on its right side, if it is one."""
        batch, rows, width, outputs = size
        tied = weight is not None and not self.own(weight)
        quantised = self.quantised_attention if weight is None else weight.untyped_storage()._cdata in self._quantised
        own_bias = bias is not None and self.own(bias)
        entry = {"op": "gemm", "name": name, "batch": batch, "M": rows, "K": width, "N": outputs}
        kind = {"weight": weight is not None, "bias": own_bias, "tied": tied, "quantised": quantised}
        self.operations.append(entry | kind | {"cls": "attention" if weight is None else "fc"} | fields)

    def add_pass(
        self, name: str, kind: str, rows: int, width: int, cls: str = "other", parameters: int = 0, trained: bool = True
    ) -> None:
        """Record one pass over (rows, width) values, of a ``kind`` that the cost model knows."""
        entry = {"op": "pointwise", "name": name, "kind": kind, "rows": rows, "width": width}
        self.operations.append(entry | {"cls": cls, "parameters": parameters, "trained": trained})

    def own(self, parameter: Tensor) -> bool:
        """Count the parameter unless some operation has; True if it was new."""
        key = (parameter.untyped_storage()._cdata, int(parameter.storage_offset()))
        new = key not in self._counted
        self._counted.add(key)
        return new

    def is_parameter(self, tensor: Any) -> bool:
        """Return whether ``tensor`` is a parameter of the model, or a view of one."""
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._names

    def named(self, tensor: Tensor, otherwise: str) -> tuple[str, Tensor | None]:
        """Return the name of the parameter that ``tensor`` is, and it; ``otherwise`` and None for what is none."""
        name = self._names.get(tensor.untyped_storage()._cdata)
        return (otherwise, None) if name is None else (name, tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        record = self._known.get(func.overloadpacket)
        if record and not self._inside_linear:
            scope = self._scopes[-1] if self._scopes else ""
            record(self, f"{scope}.{func.overloadpacket.__name__}".lstrip("."), args, out)
        return out
