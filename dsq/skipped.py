"""Skipped modules: those of a converted model whose matrices are multiplied in floating point, and why."""

from dataclasses import dataclass
from types import MethodType

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from dsq.ops.checks import of_another_quantization
from dsq.quantizers import Quantized

#: modules whose matrices are tables or scales, no operands of a product
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NO_PRODUCT = (*_EMBEDDINGS, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
_CONVERTED = (nn.Linear, nn.MultiheadAttention, NonDynamicallyQuantizableLinear)  #: unless an option skips them
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
RNNS = (nn.RNNBase, nn.RNNCellBase)
#: PyTorch's modules with matrices whose own forwards read them, in no product that is quantized
OF_PYTORCH = (
    *(*_NO_PRODUCT, *_CONVOLUTIONS, *RNNS, nn.Bilinear, nn.MultiheadAttention),
    *(nn.ParameterList, nn.ParameterDict, ParametrizationList),
)


@dataclass(frozen=True)
class SkippedModule:
    """A module with parameters of two dimensions or more that is not quantized."""

    name: str  #: in the model; "" for the model itself
    kind: str  #: the name of its class
    parameters: int  #: number of values in those parameters, without those shared with a converted layer
    reason: str


def skipped_modules(model: nn.Module) -> tuple[SkippedModule, ...]:
    """Return the skipped modules of ``model``, in its order; a shared parameter counts once."""
    counted = {id(p) for m in model.modules() if _quantizes(m) for p in matrices(m)}
    tables = embedded(model)
    skipped = []
    for name, module in model.named_modules():
        if isinstance(module, _NO_PRODUCT) or _quantizes(module):
            continue
        if any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)):
            skipped.append(SkippedModule(name, _kind(module).__name__, 0, "lazy: convert after its first forward"))
        weights = [p for p in matrices(module) if id(p) not in counted and not is_added(module, p)]
        if not weights:
            continue
        counted |= {id(p) for p in weights}
        reason = _reason(module, weights, tied=all(id(p) in tables for p in weights))
        skipped.append(SkippedModule(name, _kind(module).__name__, sum(p.numel() for p in weights), reason))
    return tuple(skipped)


def _kind(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module`` before conversion."""
    return module.original if isinstance(module, Quantized) else type(module)


def _quantizes(module: nn.Module) -> bool:
    """Return whether ``module`` is converted, unless no forward did a matrix product."""
    return isinstance(module, Quantized) and not getattr(module, "idle", False)


def is_added(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` has the shape of a term or a gain, which no product reads.

    Those are a vision model's tokens and positions, 1 x tokens x width, and gains of channels, 1 x C x 1 x 1 or
    C x 1 x 1.
    """
    gain = parameter.numel() == max(parameter.shape)
    return parameter.dim() > 2 and (gain or parameter.shape[0] == 1) and not isinstance(module, _CONVOLUTIONS)


def bound_forwards_of(module: nn.Module) -> list[str]:
    """Return the attributes of ``module`` itself that bind its class's forward, such as those of accelerate's hooks."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, MethodType) and value.__self__ is module and value.__func__ is type(module).forward
    ]


def has_other_forward(module: nn.Module) -> bool:
    """Return whether ``module`` itself has a forward that misses its class's, as accelerate's prepare sets."""
    return "forward" in vars(module) and not {"forward", "_old_forward"}.intersection(bound_forwards_of(module))


def matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of two dimensions or more of ``module`` itself and of its parametrizations.

    Lazy ones are left out: they have no shape before the first forward.
    """
    parameters = list(module.parameters(recurse=False))
    if is_parametrized(module):
        assert isinstance(module.parametrizations, nn.ModuleDict)
        parameters += module.parametrizations.parameters()
    return [p for p in parameters if not isinstance(p, UninitializedParameter) and p.dim() > 1]


def embedded(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings; a layer that shares one is tied."""
    return {id(p) for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}


def _reason(module: nn.Module, weights: list[nn.Parameter], tied: bool) -> str:
    kind = _kind(module)
    if has_other_forward(module):
        return "its forward was set on the instance, as accelerate's prepare does: convert the model before"
    if any(p.is_complex() for p in weights):
        return "its parameters are complex"
    if any(map(of_another_quantization, weights)):
        return "its weight is of another quantization"
    if kind is nn.Linear and tied:
        return "its weight is an embedding's too, which learns little in few bits; give tied=True to convert it"
    if kind not in _CONVERTED and is_router(module, weights):
        return "a router of experts: its few products choose the expert of a token"
    if _is_convertible(module, kind, weights):
        return "excluded, an adapter (adapters=True converts it), of plain_ends, or added after the conversion"
    if isinstance(module, nn.Linear):
        return f"a subclass of nn.Linear, {kind.__name__}, whose weight is of another quantization"
    if isinstance(module, nn.MultiheadAttention):
        return f"a subclass of nn.MultiheadAttention, {kind.__name__}, may multiply in another way"
    if isinstance(module, _CONVOLUTIONS):
        return "a convolution"
    if isinstance(module, RNNS):
        return "its products are inside of one operation of PyTorch's, which this report does not count"
    if any(p.dim() == 3 for p in weights):
        return "its parameters of three dimensions are not multiplied by an operation that dsq knows"
    return f"{kind.__name__} has matrices of its own, but its forward multiplies by none in a product that dsq knows"


def is_router(module: nn.Module, weights: list[nn.Parameter]) -> bool:
    """Return whether ``module``, which multiplies by ``weights``, chooses the experts of a token."""
    return hasattr(module, "top_k") and all(p.dim() == 2 for p in weights)


def cuts_patches(module: nn.Module) -> bool:
    """Return whether ``module`` is an nn.Conv2d of adjacent, non-overlapping windows."""
    return (
        isinstance(module, nn.Conv2d)
        and module.stride == module.kernel_size
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )


def _is_convertible(module: nn.Module, kind: type[nn.Module], weights: list[nn.Parameter]) -> bool:
    """Return whether ``convert`` would convert ``module``, whose class was ``kind``, but for its options."""
    if isinstance(module, Quantized):  # idle
        return False
    if kind in _CONVERTED or (kind is nn.Conv2d and cuts_patches(module)):
        return True
    return not isinstance(module, OF_PYTORCH) and all(may_be_trained(p) for p in weights)


def may_be_trained(parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` has values of PyTorch's own that training changes."""
    return type(parameter) is nn.Parameter and parameter.is_floating_point()


def quantized_parameters(model: nn.Module) -> int:
    """Return the number of parameters in the matrices of converted layers; a shared one counts once."""
    sizes = {id(p): p.numel() for module in model.modules() if _quantizes(module) for p in matrices(module)}
    return sum(sizes.values())
