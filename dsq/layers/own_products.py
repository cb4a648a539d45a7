"""Modules that multiply in their own forward: by parameters of their own, or queries by keys as attention does.

A function mode around the forward sees each product: F.linear, @, matmul, mm, bmm, addmm, einsum, grouped_mm and
F.scaled_dot_product_attention. A product with a parameter is computed as in ``dsq.Linear``. A parameter of several
matrices is multiplied one matrix at a time, and small ones are not quantized. Shape suffixes: B matrices, M rows, K the
contraction, N columns.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dsq.arguments import check_keys, whole_number
from dsq.layers import Mixed, not_compiled_alone
from dsq.linear import linear
from dsq.ops.einsum import as_product, two_operands
from dsq.ops.products import attention, matmul_of_activations
from dsq.ops.torch_checkpoint import in_backward
from dsq.quantizers import Quantized, Quantizers
from dsq.skipped import OF_PYTORCH, is_added, is_router, matrices, may_be_trained

#: multiply-accumulates below which one of several matrices is not quantized: in few bits it takes 1.2 to 6 times as
#: long below, forward and backward, and 1.7 to 0.7 times above (docs/report.md)
MIN_QUANTIZED_MACS = 1 << 25
#: what a resumed run needs to watch the forwards that an unbroken one does
_WATCH = ("multiplied", "idle", "training_forwards", "evaluation_forwards")


class OwnProducts(Mixed, Quantized, nn.Module):
    """A module that multiplies by parameters of its own.

    Until a forward multiplies by them the module is ``idle``: of its forwards in training mode, and of those in
    evaluation, only the first 16, then number 32, 64 and so on run under the mode.
    """

    multiplied = False  #: a forward did a matrix product with them
    idle = False  #: no forward under the mode did
    training_forwards = evaluation_forwards = 0  #: while it was idle
    attending = False  #: whether its products of two activations are quantized too
    small_flops = 0  #: FLOPs of the latest forward in products too small to be quantized

    def forward(self, *args: Any, **keywords: Any) -> Any:
        if not isinstance(self, OwnProducts):  # unconverted under a wrapper of this function, such as accelerate's
            return type(self).forward(self, *args, **keywords)
        if self.evaluates_unquantized or (self.idle and not self._is_watched()):
            return super().forward(*args, **keywords)
        with Products(self.quantizers, matrices(self), self.attending) as products:
            result = super().forward(*args, **keywords)
        if not torch.compiler.is_compiling():
            self.multiplied = self.multiplied or products.multiplied
            self.idle, self.small_flops = not self.multiplied, products.small_flops
        return result

    def _is_watched(self) -> bool:
        """Count a forward of the idle module; return whether it runs under the mode: another path may multiply."""
        if torch.compiler.is_compiling():
            return False
        name = "training_forwards" if self.training else "evaluation_forwards"
        count = vars(self)[name] = getattr(self, name) + 1
        # a checkpoint is recomputed as its forward ran
        return (count <= 16 or count & (count - 1) == 0) and not in_backward()


def watches(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return, by name of a module with matrices of its own, what decides which of its forwards run under the mode."""
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, OwnProducts))
    fields = {name: {key: int(getattr(module, key)) for key in _WATCH} for name, module in modules}
    return {name: watch for name, watch in fields.items() if any(watch.values())}


def set_watches(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Set what ``watches`` returned; a module without an entry begins anew. Warns of names that the model lacks, as of
    one that was wrapped since, and raises ValueError for another state."""
    if not isinstance(state, Mapping):
        raise ValueError(f"own_products of the state must be a dictionary by names of modules, got {state!r:.60}")
    modules = dict(model.named_modules())
    if missing := [name for name in state if not isinstance(modules.get(name), OwnProducts)]:
        warnings.warn(f"own_products of the state name no such module: {', '.join(missing[:3])}", stacklevel=3)
    for name, module in modules.items():
        if isinstance(module, OwnProducts):
            watch = state.get(name, dict.fromkeys(_WATCH, 0))
            check_keys(f"state of module {name!r}", watch, _WATCH)
            vars(module).update(
                {key: type(getattr(OwnProducts, key))(whole_number(key, watch[key], 0)) for key in _WATCH}
            )


class OwnAttention(Mixed, nn.Module):
    """A module whose forward computes attention: its products are quantized at the level of its projections."""

    def forward(self, *args: Any, **keywords: Any) -> Any:
        if not isinstance(self, OwnAttention):  # unconverted under a wrapper of this function, such as accelerate's
            return type(self).forward(self, *args, **keywords)
        layer = next((layer for layer in self.modules() if isinstance(layer, Quantized)), None)
        if layer is None or layer.evaluates_unquantized:
            return super().forward(*args, **keywords)
        with Products(layer.quantizers, [], True):
            return super().forward(*args, **keywords)


class Products(TorchFunctionMode):
    """Quantizes products with ``weights``, and those of two activations if ``attending``."""

    def __init__(self, quantizers: Quantizers, weights: list[Any], attending: bool) -> None:
        super().__init__()
        self.quantizers, self.weights, self.attending = quantizers, weights, attending
        self.multiplied = False  #: there was such a product
        self.small_flops = 0  #: FLOPs of products below MIN_QUANTIZED_MACS

    @not_compiled_alone
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        quantized, result = _QUANTIZED.get(func), None
        if quantized is not None and not any(isinstance(x, Tensor) and x.layout is not torch.strided for x in args):
            result = quantized(self, *args, **kwargs)  # not sparse, as the features of a graph
        if result is not None:
            self.multiplied = True
            return result
        if func is Tensor.unflatten:  # a Python function that a compiler does not trace under a mode
            func = torch.unflatten
        return func(*args, **kwargs)

    def owns(self, x: Any) -> bool:
        """Return whether ``x`` is one of the weights, or a view of one."""
        if not isinstance(x, Tensor):
            return False
        return any(x is weight or x._base is weight for weight in self.weights)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        return linear(input, weight, bias, self.quantizers) if self.owns(weight) and not self.owns(input) else None

    def addmm(self, input: Tensor, mat1: Tensor, mat2: Tensor, **scaled: Any) -> Tensor | None:
        return None if scaled or input.dim() != 1 else self.linear(mat1, mat2.mT, input)

    def matmul(self, input: Any, other: Any, **options: Any) -> Tensor | None:
        if options:  # such as out, which dsq's own kernels give
            return None
        if not isinstance(input, Tensor) or not isinstance(other, Tensor) or min(input.dim(), other.dim()) < 2:
            return None
        if self.owns(other) or self.owns(input):
            return self._by_weight(input, other)
        if self.attending and min(input.dim(), other.dim()) > 2 and input.is_floating_point():
            return matmul_of_activations(input, other, self.quantizers.activation_matmuls, self.quantizers.seed())
        return None

    def _by_weight(self, a: Tensor, b: Tensor) -> Tensor | None:
        if self.owns(a):
            y = None if self.owns(b) else self._by_weight(b.mT, a.mT)
            return None if y is None else y.mT
        if b.dim() == 2:
            return linear(a, b.mT, None, self.quantizers)
        return self._batched(a, b.mT) if b.dim() == 3 and (a.dim() == 2 or a.shape[:-2] == b.shape[:1]) else None

    def _batched(self, x_BMK: Tensor, w_BNK: Tensor) -> Tensor:
        if self._is_small(x_BMK.shape[-2], w_BNK):
            return x_BMK @ w_BNK.mT
        xs_MK = x_BMK.unbind() if x_BMK.dim() == 3 else [x_BMK] * len(w_BNK)
        return torch.stack([linear(x, w, None, self.quantizers) for x, w in zip(xs_MK, w_BNK.unbind(), strict=True)])

    def _is_small(self, rows: int, w_NK: Tensor) -> bool:
        """Return whether ``rows`` by one matrix of ``w_NK`` (..., N, K) is below MIN_QUANTIZED_MACS; count it if so.

        No product is at a level that names formats to simulate: a study's products may not depend on a router's choice.
        """
        small = rows * w_NK.shape[-2] * w_NK.shape[-1] < MIN_QUANTIZED_MACS
        if small and self.quantizers.operands is not None and self.quantizers.mode == "simulation":
            return False
        if small:
            self.small_flops += 2 * rows * w_NK.numel()
        return small

    def grouped(self, input: Tensor, mat2: Tensor, *, offs: Tensor | None = None, **options: Any) -> Tensor | None:
        """Return grouped_mm of rows sorted by group, each group by its matrix (K, N) of ``mat2``."""
        default = all(value is None for value in options.values())
        if not default or offs is None or input.dim() != 2 or mat2.dim() != 3 or not self.owns(mat2):
            return None
        rows = offs.diff(prepend=offs.new_zeros(1)).tolist()
        operands = zip(input[: sum(rows)].split(rows), mat2.mT.unbind(), strict=True)
        q = self.quantizers
        y = torch.cat([F.linear(x, w) if self._is_small(len(x), w) else linear(x, w, None, q) for x, w in operands])
        return y if len(y) == len(input) else F.pad(y, (0, 0, 0, len(input) - len(y)))

    def einsum(self, equation: Any, *operands: Any) -> Tensor | None:
        """Return torch.einsum of two operands if it is a product of matrices."""
        pair = two_operands(equation, operands)
        if pair is None:
            return None
        owned = [self.owns(x) for x in pair]
        if all(owned) or not (any(owned) or self.attending):
            return None
        product = as_product(equation, *pair, swapped=owned[0])
        if product is None:
            return None
        a, b = product.a, product.b
        if not any(owned):
            if a.dim() < 3 or not product.rows:
                return None
            return product.result(
                matmul_of_activations(a, b.mT, self.quantizers.activation_matmuls, self.quantizers.seed())
            )
        if a.dim() == 2:
            return product.result(linear(a, b, None, self.quantizers))
        return product.result(self._batched(a.flatten(0, -3), b.flatten(0, -3)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *options: Any, **keywords: Any) -> Tensor | None:
        if not self.attending:
            return None
        q = self.quantizers
        return attention(query, key, value, q.activation_matmuls, *options, **keywords, seed=q.seed())[0]  # type: ignore[misc]


_QUANTIZED: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: Products.linear,
    torch.addmm: Products.addmm,
    torch.einsum: Products.einsum,
    F.scaled_dot_product_attention: Products.attend,
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), Products.matmul),
    **dict.fromkeys((Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__), Products.matmul),
    **dict.fromkeys((F.grouped_mm, torch._grouped_mm), Products.grouped),
}


def may_multiply(module: nn.Module) -> bool:
    """Return whether ``module`` has matrices that its own forward may multiply by.

    Its forwards show whether they do. Routers are skipped: their few products choose the expert of a token.
    """
    weights = [p for p in matrices(module) if not is_added(module, p)]
    trained = all(map(may_be_trained, weights))
    return bool(weights) and trained and not is_router(module, weights) and not isinstance(module, OF_PYTORCH)


def attends(module: nn.Module, kind: Any) -> bool:
    """Return whether the forward of ``kind``, the class of ``module``, multiplies queries by keys.

    Such a forward calls PyTorch's function, or a softmax in a module with layers or matrices that project. The names in
    its code tell: by its products alone, q k^T cannot be told from others before the softmax that follows has run.
    """
    names = _names_in_forward(kind)
    if hasattr(module, "top_k"):  # a router
        return False
    if "softmax" not in names:
        return "scaled_dot_product_attention" in names
    return bool(matrices(module)) or any(isinstance(child, (nn.Linear, Quantized)) for child in module.children())


@lru_cache(maxsize=1024)
def _names_in_forward(kind: Any) -> frozenset[str]:
    """Return the names of the functions and attributes in the forward of ``kind``, and in the methods it calls."""
    names = set[str]()
    methods = ["forward"]
    while methods:
        method = inspect.unwrap(getattr(kind, methods.pop()))
        new_names = set(_names(method.__code__)) - names if isinstance(method, FunctionType) else set()
        names |= new_names
        methods += [name for name in new_names if hasattr(kind, name) and not hasattr(nn.Module, name)]
    return frozenset(names)


def _names(code: CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:  # functions and comprehensions inside
        if isinstance(constant, CodeType):
            yield from _names(constant)
