"""Modules of a converted model whose matrices are multiplied in floating point, and why."""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from dsq.linear import of_another_quantization
from dsq.quantizers import Quantized

#: matrices of these are tables or scales, no operands of a product
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NO_PRODUCT = (*_EMBEDDINGS, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
_CONVERTED = (nn.Linear, nn.MultiheadAttention, NonDynamicallyQuantizableLinear)  #: unless asked otherwise
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)


@dataclass(frozen=True)
class SkippedModule:
    """A module with parameters of two dimensions or more that is not quantized."""

    name: str
    kind: str  #: its class
    parameters: int  #: values of those parameters that no converted layer has too
    reason: str


def skipped_modules(model: nn.Module) -> tuple[SkippedModule, ...]:
    """Return what of ``model`` is not quantized, in its order; a parameter counts once."""
    seen = {id(p) for m in model.modules() if _quantizes(m) for p in matrices(m)}
    tables = embedded(model)
    found = []
    for name, module in model.named_modules():
        if isinstance(module, _NO_PRODUCT) or _quantizes(module):
            continue
        if any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)):
            found.append(SkippedModule(name, _kind(module).__name__, 0, "lazy: convert after its first forward"))
        own = [p for p in matrices(module) if id(p) not in seen and not _added(module, p)]
        if not own:
            continue
        seen |= {id(p) for p in own}
        tied = all(id(p) in tables for p in own)
        found.append(SkippedModule(name, _kind(module).__name__, sum(p.numel() for p in own), _why(module, own, tied)))
    return tuple(found)


def _kind(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module``, as it was before the conversion if its forward was seen to multiply by none."""
    return module.plain if isinstance(module, Quantized) else type(module)


def _quantizes(module: nn.Module) -> bool:
    """Return whether ``module`` is converted, and was not seen to multiply by none of its matrices."""
    return isinstance(module, Quantized) and not getattr(module, "idle", False)


def _added(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` has the shape of a vision model's tokens and positions, 1 x tokens x width, or of a
    gain of channels, 1 x C x 1 x 1 or C x 1 x 1."""
    gain = parameter.numel() == max(parameter.shape)
    return parameter.dim() > 2 and (gain or parameter.shape[0] == 1) and not isinstance(module, _CONVOLUTIONS)


def matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of ``module`` itself, or those that its parametrizations make them of, of two dimensions or
    more.

    A lazy one has no shape before its first forward.
    """
    own = list(module.parameters(recurse=False))
    if is_parametrized(module):
        assert isinstance(module.parametrizations, nn.ModuleDict)
        own += module.parametrizations.parameters()
    return [p for p in own if not isinstance(p, UninitializedParameter) and p.dim() > 1]


def embedded(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings: a layer that has one too is tied."""
    return {id(p) for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}


def _why(module: nn.Module, own: list[nn.Parameter], tied: bool) -> str:
    kind = _kind(module)
    if any(p.is_complex() for p in own):
        return "its parameters are complex"
    if any(map(of_another_quantization, own)):
        return "its weight is of another quantization"
    if kind is nn.Linear and tied:
        return "its weight is an embedding's too, which few bits keep from learning; DSQConfig(tied=True) converts it"
    if kind in _CONVERTED or kind.__name__ == "Conv1D":
        return "excluded, an adapter (adapters=True converts it), of plain_ends, or added after the conversion"
    if isinstance(module, nn.Linear):
        return f"a subclass of nn.Linear, {kind.__name__}, whose weight is of another quantization"
    if isinstance(module, nn.MultiheadAttention):
        return f"a subclass of nn.MultiheadAttention, {kind.__name__}, may multiply otherwise"
    if isinstance(module, _CONVOLUTIONS):
        return "a convolution"
    if isinstance(module, nn.RNNBase):
        return "its products are inside of one operation of PyTorch's, and no GFLOP of this report counts them"
    if any(p.dim() == 3 for p in own):
        return "parameters of three dimensions, multiplied where dsq does not see them, or not at all"
    if hasattr(module, "top_k"):
        return "a router of experts: its few products decide which expert serves a token"
    return f"{kind.__name__} holds matrices itself, and its forward calls no product by them that dsq knows"


def quantized_parameters(model: nn.Module) -> int:
    """Return how many values the matrices hold that converted layers multiply; tied ones count once."""
    found = {id(p): p.numel() for module in model.modules() if _quantizes(module) for p in matrices(module)}
    return sum(found.values())
