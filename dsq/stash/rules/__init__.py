"""The rules: for each operation, which of its tensors are saved for the backward, in which form and bits.

This is an allow list. An operation without a rule saves its tensors as PyTorch does. A rule is a function with
PyTorch's own signature behind the stash of the forward, and an autograd function of a dozen lines that saves forms
(dsq/stash/saved_forms.py) and calls PyTorch's own backward on their values. Two principles:

1.  The unpacked tensors are a state that the operation could have been in. So its backward is the exact gradient at a
    point nearby, and terms that cancel in exact arithmetic still cancel. Rows of a softmax are divided by their sums;
    fused attention recomputes its result and the logarithms of its sums from the rounded q, k and v.
2.  A tensor that can be recomputed, value by value, from saved ones is not saved. A norm saves x^, from which the input
    of the linear layer behind it is recomputed; an activation saves its input, from which its result is.

In the table x is the operation's input and x^ = (x - mean) / deviation. "Saved" tensors are in codes, but for weights,
integers and tensors of up to 256 values (Stash.code). "Recomputed" is the tensor that a later operation, which would
save it too, recomputes from them. "More bits" are EXTRA_BITS of dsq/stash_bits.py.

    operation                             saved                                     recomputed
    linear, dsq.functional.linear, addmm  x                                         -; layers that read one x share it
    matmul, mm, bmm, @, einsum of two     both operands
    grouped_mm                            x
    convolution                           x
    softmax                               square roots of its result, in more bits  rows that sum to 1
    fused attention                       q, k, v, in more bits                     its result, its sums
    layer, RMS, batch, group norm, and    x^, and 1 / deviation exact               its result
        instance norm; F.normalize
    GELU, SiLU, tanh, ... , x ** 2, ** 3  x                                         its result
    product of two tensors, addcmul       both; a broadcast one exact               its result; addcmul's is not
    difference to data; division          what PyTorch saves                        -; the quotient
    1 - z                                 nothing                                   its result, if z is recomputed
    sum of a few values and many          nothing                                   its result
    contiguous                            nothing                                   its result, if x is recomputed
    ReLU, leaky, ReLU6, hardtanh, clamp   a bit a value                             its result, if x is saved
    PReLU                                 a bit a value, and x for its weight's     its result
    dropout                               a bit a value                             its result, if x is saved
    max-pool; average pool, padding       indices of maxima, 16 or 32 bits; none
    index_select, x[index]                the index                                 its result, if x is saved
    index_add, gather                     the index, not what is added or read
    norm, by 2, of a saved tensor         nothing                                   its result

These have no rule, by evidence: losses and log-softmax (the gradient is most sensitive to them: GACT, section 6.1),
operations that divide or compare (amax, log), sin and cos of large arguments. docs/extending.md shows how to add a
rule.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.linear import linear
from dsq.stash.rules import attention, masks, movement, norms, pointwise, products

Rule = Callable[..., Any]
aten = torch.ops.aten
_OUTER = (torch.where, torch.add, Tensor.add, Tensor.__add__)
#: functions whose rules run if no argument needs a gradient too: their results may be masks, which are saved
ALSO_WITHOUT_GRADIENT = frozenset((*_OUTER, Tensor.contiguous))
#: the functions that each rule runs for
_FUNCTIONS: dict[Rule, tuple[Any, ...]] = {
    products.unquantized_linear: (F.linear,),
    products.quantized_linear: (linear,),
    products.addmm: (torch.addmm,),
    products.matmul: (torch.matmul, Tensor.matmul, Tensor.__matmul__),
    products.bmm: (torch.bmm, Tensor.bmm, torch.mm, Tensor.mm),
    products.einsum: (torch.einsum,),
    products.grouped_mm: (F.grouped_mm, torch._grouped_mm),
    attention.softmax: (F.softmax,),
    attention.torch_softmax: (torch.softmax, Tensor.softmax),
    attention.safe_softmax: (aten._safe_softmax,),
    attention.fused: (F.scaled_dot_product_attention,),
    norms.layer_norm: (F.layer_norm,),
    norms.rms_norm: (F.rms_norm,),
    norms.batch_norm: (F.batch_norm,),
    norms.instance_norm: (F.instance_norm,),
    norms.group_norm: (F.group_norm,),
    norms.normalize: (F.normalize,),
    pointwise.prelu: (torch.prelu, Tensor.prelu),
    pointwise.addcmul: (torch.addcmul, Tensor.addcmul),
    pointwise.mul: (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply),
    pointwise.sub: (torch.sub, Tensor.sub, Tensor.__sub__),
    pointwise.rsub: (torch.rsub,),
    pointwise.contiguous: (Tensor.contiguous,),
    pointwise.div: (torch.div, Tensor.div, Tensor.__truediv__),
    pointwise.power: (torch.pow, Tensor.pow),
    masks.relu: (F.relu, torch.relu, Tensor.relu),
    masks.relu_in_place: (torch.relu_, Tensor.relu_),
    masks.clamp: (torch.clamp, Tensor.clamp, torch.clip, Tensor.clip),
    masks.dropout: (F.dropout,),
    masks.torch_dropout: (torch.dropout,),
    masks.native_dropout: (torch.native_dropout,),
    movement.adaptive_avg_pool2d: (F.adaptive_avg_pool2d,),
    movement.pad: (F.pad,),
    pointwise.norm: (torch.norm,),
    pointwise.vector_norm: (torch.linalg.vector_norm,),
    movement.index_select: (torch.index_select, Tensor.index_select),
    movement.getitem: (Tensor.__getitem__,),
    movement.gather: (torch.gather, Tensor.gather),
    movement.index_add: (torch.index_add, Tensor.index_add),
    movement.index_add_in_place: (Tensor.index_add_,),
}
RULES: dict[Callable[..., Any], Rule] = {
    **products.CONVOLUTIONS,
    **pointwise.ACTIVATIONS,
    **movement.POOLS,
    **{function: rule for rule, functions in _FUNCTIONS.items() for function in functions},
    **{function: pointwise.outer(function) for function in _OUTER},
}
