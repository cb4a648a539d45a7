"""The table: a row an operation, which says what of its arguments and results is kept, in which form and bits.

An allow list. What has no row stays exact, as PyTorch keeps it: a policy codes only what an operation is known to bear.
A row is a function with PyTorch's own signature behind the stash of the forward, and an autograd function of a dozen
lines that saves forms (dsq/stash/saved_forms.py) and calls PyTorch's own backward of their values. Two principles:

1.  What is unpacked is a state that the operation could have been in. Then its backward is the exact gradient at a
    point nearby, and what cancels in exact arithmetic still cancels. Rows of a softmax are divided by their sums;
    attention in one call makes its result and its logarithms of sums again from the rounded q, k and v.
2.  What can be made again, value by value, from what is kept already is not kept. A norm keeps x^, of which the input
    of the linear layer behind it is made; an activation its input, of which its result is.

    operation                             kept                                      made again of it
    linear, dsq.functional.linear, addmm  x                                         x of another layer that reads it
    matmul, mm, bmm, @, einsum of two     both operands
    grouped_mm                            x
    convolution                           x
    softmax                               roots of its result, in more bits         rows that sum to 1
    attention in one call                 q, k, v, in more bits                     its result, its sums
    layer, RMS, batch, group norm, and    x^, and 1 / deviation exact               its result
        instance norm; F.normalize
    GELU, SiLU, tanh, ... , x ** 2, ** 3  x                                         its result
    product of two tensors, addcmul       both; a broadcast one exact               its result; addcmul's not
    difference to data; division          as PyTorch keeps them                     - ; the quotient
    1 - z                                 nothing                                   its result, where z is made again
    sum, where of few values for many     nothing                                   its result, of these
    contiguous                            nothing                                   its result, where x is made again
    ReLU, leaky, ReLU6, hardtanh, clamp   a bit a value                             its result, where x is kept
    PReLU                                 a bit a value, and x for its weight's     its result
    dropout                               a bit a value                             its result, where x is kept
    max-pool; average pool, padding       places in 16 or 32 bits; nothing
    index_select, x[index]                the index                                 its result, where x is kept
    index_add, gather                     the index, not what is added or read
    norm, by 2, of what is kept already   nothing                                   its result

What is worth more bits stands in dsq/stash/bfp.py. No row, by evidence: losses and log-softmax (the gradient is most
sensitive to them: GACT, section 6.1), what divides or compares (amax, log), sin and cos of large arguments.
docs/extending.md shows how to add a row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.linear import linear
from dsq.stash.rules import attention, masks, norms, pointwise, products

Rule = Callable[..., Any]
aten = torch.ops.aten
_OUTER = (torch.where, torch.add, Tensor.add, Tensor.__add__)
#: functions whose rows run without a gradient too: masks want none, and are kept
MASK_RULES = frozenset((*_OUTER, Tensor.contiguous))
#: the functions that each row runs for
_FUNCTIONS: dict[Rule, tuple[Any, ...]] = {
    products.plain_linear: (F.linear,),
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
    masks.adaptive_avg_pool2d: (F.adaptive_avg_pool2d,),
    masks.pad: (F.pad,),
    pointwise.norm: (torch.norm,),
    pointwise.vector_norm: (torch.linalg.vector_norm,),
    pointwise.index_select: (torch.index_select, Tensor.index_select),
    pointwise.getitem: (Tensor.__getitem__,),
    pointwise.gather: (torch.gather, Tensor.gather),
    pointwise.index_add: (torch.index_add, Tensor.index_add),
    pointwise.index_add_in_place: (Tensor.index_add_,),
}
RULES: dict[Callable[..., Any], Rule] = {
    **products.CONVOLUTIONS,
    **pointwise.ACTIVATIONS,
    **masks.POOLS,
    **{function: row for row, functions in _FUNCTIONS.items() for function in functions},
    **{function: pointwise.outer(function) for function in _OUTER},
}
