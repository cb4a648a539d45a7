"""The ledger of a training step: each tensor once, with its producer, its stored width, its readers and how long it is
kept. Traffic (traffic.py), the stash and peak memory (entries.py, memory.py) are sums over it.

A tensor is stored at one width, whoever reads it: an operation that wants another width converts on chip. What one
operation writes for others (y, dx) and what it reads of others (x, dy) is stored at the container width `a`; a
converted layer adds one packed copy, its stash. Under autocast the residual stream has a width `r` of its own, and each
product writes the copy of x and w that it multiplies. So every read was written, at the width it was written in.
"""

from dataclasses import dataclass, replace
from typing import Literal

from costmodel.model.operations import Gemm
from dsq.kept import What

#: width of master weights, weight gradients, biases and Adam's moments
STATE_BITS = 32
ID_BITS = 64
#: a dropout mask's entry, as CUDA's native dropout keeps it
MASK_BITS = 8

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
#: who writes a tensor: one of the operation's own phases, or one of these
BEFORE, AFTER, BATCH = "before", "after", "batch"  # an earlier operation's y; a later one's dx; the data loader

#: how a policy of dsq.stash keeps a tensor: in codes, with the bits that it gives to a word of What; in a bit a value;
#: not at all, since the backward makes it again; as it is
Coded = What | Literal["bit", "made again", ""]


@dataclass(frozen=True)
class Read:
    """One reader of a stored tensor."""

    phase: str
    name: str = ""  #: the reader's name for it; empty: the tensor's own
    needs: str = ""  #: happens only if this field of the operation is true ("x_grad", "w_grad")


@dataclass(frozen=True)
class Stored:
    """One tensor as it is stored: widths "q0".."q3" are packed codes, others those of traffic.widths_of."""

    name: str
    shape: str  #: two axes of M, K, N (matrix products); "values", or a field of the operation (pointwise)
    width: str
    written: str  #: FORWARD, BACKWARD or UPDATE: by this operation; else BEFORE, AFTER, BATCH
    reads: tuple[Read, ...] = ()
    kept: bool = False  #: from the forward to the backward
    needs: str = ""  #: exists only if this field of the operation is true
    times: int = 1  #: number of such tensors
    coded: Coded = ""  #: how a policy keeps it
    copied: Coded = ""  #: how a policy keeps it if it is a 16-bit copy of an fp32 tensor; empty: as `coded` says

    @property
    def own(self) -> bool:
        """Whether this operation writes it."""
        return self.written in (FORWARD, BACKWARD, UPDATE)


_W = Stored(
    "w",
    "NK",
    "w",  # the working copy, which the optimiser writes
    UPDATE,
    (Read(FORWARD), Read(BACKWARD, "w (for dx)", "x_grad")),
)
_DY = Stored("dy", "MN", "a", AFTER, (Read(BACKWARD, "dy (for dx)", "x_grad"), Read(BACKWARD, "dy (for dw)", "w_grad")))
_Y = Stored("y", "MN", "a", FORWARD)
_DX = Stored("dx", "MK", "a", BACKWARD, needs="x_grad")
_X_READ, _X_AGAIN = Read(FORWARD), Read(BACKWARD, "x (for dw)", "w_grad")
_STASH_READ = (Read(BACKWARD, needs="w_grad"),)
_DW = Stored("dw", "NK", "state", BACKWARD, needs="w_grad")

#: a linear layer that keeps x itself
LINEAR = (Stored("x", "MK", "a", BEFORE, (_X_READ, _X_AGAIN), kept=True, coded="linear"), _W, _Y, _DY, _DX, _DW)
#: a converted one: it packs x at q1
CONVERTED = (
    Stored("x", "MK", "a", BEFORE, (_X_READ,)),
    Stored("stash", "MK", "q1", FORWARD, _STASH_READ, kept=True, needs="w_grad"),
    *(_W, _Y, _DY, _DX, _DW),
)
#: attention's products: activations on both sides, each read again for the other's gradient
PRODUCT = (
    Stored("x", "MK", "a", BEFORE, (_X_READ, _X_AGAIN), kept=True, coded="product"),
    Stored("w", "NK", "a", BEFORE, _W.reads, kept=True, coded="product"),
    *(_Y, _DY, _DX),
    Stored("dw", "NK", "a", BACKWARD, needs="w_grad"),
)
CONVERTED_PRODUCT = (
    Stored("x", "MK", "a", BEFORE, (_X_READ,)),
    Stored("w", "NK", "a", BEFORE, (Read(FORWARD),)),
    Stored("stash", "MK", "q1", FORWARD, _STASH_READ, kept=True, needs="w_grad"),
    Stored("stash of w", "NK", "q1", FORWARD, (Read(BACKWARD, needs="x_grad"),), kept=True, needs="x_grad"),
    *(_Y, _DY, _DX),
    Stored("dw", "NK", "a", BACKWARD, needs="w_grad"),
)
BIAS = (
    Stored("bias", "N", "state", UPDATE, (Read(FORWARD),)),
    Stored("d bias", "N", "state", BACKWARD, needs="w_grad"),
)

#: a fused attention's second product keeps its output, its first one number a row, to make the scores again
FUSED = {
    "x": (replace(_Y, reads=(Read(BACKWARD),), kept=True, coded="made again"),),
    "y": (Stored("logsumexp", "M", "state", FORWARD, (Read(BACKWARD),), kept=True, coded="made again"),),
    "": (),
}


def under_autocast(gemm: Gemm, listed: tuple[Stored, ...]) -> tuple[Stored, ...]:
    """The tensors of a layer that casts its weight, and casts its x if x comes in fp32."""
    if gemm.weights > 1:
        return _uncast(tuple(replace(stored, width="state") if stored.name == "w" else stored for stored in listed))
    cast = []
    for stored in listed:
        if stored.name == "w":
            cast.append(Stored("w in fp32", "NK", "state", UPDATE, (Read(FORWARD),)))
            cast.append(replace(stored, width="a", written=FORWARD, kept=gemm.x_grad))
        elif stored.name == "x" and gemm.stream:
            cast.append(Stored("x in fp32", "MK", "r", BEFORE, (Read(FORWARD),)))
            cast.append(replace(stored, written=FORWARD))
        else:
            cast.append(stored)
    return tuple(cast)


def of_gemm(gemm: Gemm, packs: bool) -> tuple[Stored, ...]:
    """The tensors of a matrix product; `packs`: its converted layers make codes of x, not a float."""
    converted = gemm.quantised and packs
    if gemm.weight:
        return (CONVERTED if converted else LINEAR) + (BIAS if gemm.bias else ())
    product = CONVERTED_PRODUCT if converted else PRODUCT
    fused = FUSED[gemm.on_chip]
    rest = (stored for stored in product if stored.name not in [kept.name for kept in fused])
    return tuple(replace(it, coded="attention") if fused and it.coded else it for it in rest) + fused


def forward_alone(listed: tuple[Stored, ...]) -> tuple[Stored, ...]:
    """The tensors of an operation without a backward: it keeps nothing."""
    return tuple(
        replace(stored, reads=tuple(read for read in stored.reads if read.phase != BACKWARD), kept=False)
        for stored in listed
        if stored.written not in (BACKWARD, AFTER)
    )


_PX = Stored("x", "values", "a", BEFORE, (Read(FORWARD),))
_PX_KEPT = Stored("x", "values", "a", BEFORE, (Read(FORWARD), Read(BACKWARD)), kept=True, coded="activation")
_PY = Stored("y", "values", "a", FORWARD)
_PY_KEPT = Stored("y", "values", "a", FORWARD, (Read(BACKWARD),), kept=True)
_PDY = Stored("dy", "values", "a", AFTER, (Read(BACKWARD),))
_PDX = Stored("dx", "values", "a", BACKWARD)
_FACTOR = Stored("factor", "values", "a", FORWARD, (Read(FORWARD), Read(BACKWARD)), kept=True, coded="factor")
_DEVIATION = Stored("1 / deviation", "rows", "state", FORWARD, (Read(BACKWARD),), kept=True)
_MEAN = replace(_DEVIATION, name="mean", coded="made again")
_AFFINE = (
    Stored("scale and shift", "parameters", "state", UPDATE, (Read(FORWARD), Read(BACKWARD))),
    Stored("d scale and shift", "parameters", "state", BACKWARD, needs="trained"),
)
_MASK = Stored("mask", "mask", "r", BEFORE, (Read(FORWARD),), needs="mask")
_BIAS = replace(_MASK, name="bias", shape="bias", needs="bias")

# what autocast leaves in fp32: the residual stream, and the norms and embeddings on it
_RX, _RX_KEPT, _RY, _RDY, _RDX = (replace(stored, width="r") for stored in (_PX, _PX_KEPT, _PY, _PDY, _PDX))

#: the tensors of each pointwise operation
POINTWISE: dict[str, tuple[Stored, ...]] = {
    "activation": (_PX_KEPT, _PY, _PDY, _PDX),  # gelu, silu
    "relu": (_PX, replace(_PY_KEPT, coded="bit"), _PDY, _PDX),
    # transformers' "gelu_new", 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) written out: eight kernels forward, of
    # which power, tanh and the last product keep tensors; thirteen backward, two of them sums of x's three gradients
    "gelu_new": (
        replace(_PX_KEPT, reads=(Read(FORWARD),) * 3 + (Read(BACKWARD),) * 2, coded=""),  # a power that has no row
        Stored("tanh", "values", "a", FORWARD, (Read(FORWARD), Read(BACKWARD)), kept=True, coded="activation"),
        replace(_FACTOR, name="x / 2, 1 + tanh", times=2),
        Stored("between", "values", "a", FORWARD, (Read(FORWARD),), times=4),
        _PY,
        replace(_PDY, reads=(Read(BACKWARD),) * 2),
        Stored("between, backward", "values", "a", BACKWARD, (Read(BACKWARD),), times=10),
        _PDX,
    ),
    "quick_gelu": (  # x sigmoid(1.702 x): a scaled copy, its sigmoid, a product
        replace(_PX_KEPT, reads=(Read(FORWARD),) * 2 + (Read(BACKWARD),), coded="factor"),
        Stored("scaled", "values", "a", FORWARD, (Read(FORWARD),)),
        replace(_FACTOR, name="sigmoid", coded="activation"),
        _PY,
        replace(_PDY, reads=(Read(BACKWARD),) * 2),
        Stored("between, backward", "values", "a", BACKWARD, (Read(BACKWARD),), times=3),
        _PDX,
    ),
    "product": (  # y = a b, of two activations
        replace(_PX_KEPT, name="a", coded="made again"),  # of the activation that made it
        replace(_PX_KEPT, name="b", coded="factor"),
        _PY,
        _PDY,
        Stored("da, db", "values", "a", BACKWARD, times=2),
    ),
    # computed in fp32; where the container is narrower, the fp32 result is kept beside its cast
    "softmax": (
        _PX,
        replace(_PY_KEPT, coded="softmax", copied="product"),
        Stored("p in fp32", "values", "cast", FORWARD, (Read(BACKWARD),), kept=True, coded="softmax"),
        _PDY,
        _PDX,
    ),
    "norm": (replace(_RX_KEPT, coded="layernorm"), _RY, _RDY, _RDX, _MEAN, _DEVIATION, *_AFFINE),
    # an RMS norm written out in Python, as models of Hugging Face have it: x in fp32 and the normalised x are kept
    "rms": (
        _RX,
        replace(_FACTOR, name="x in fp32", width="state", coded="activation"),
        replace(_FACTOR, name="normalised", width="r", coded="made again", copied="factor"),
        _RY,
        _RDY,
        _RDX,
        _DEVIATION,
        *_AFFINE,
    ),
    "gate": (  # y = f(gate) * up
        replace(_PX_KEPT, name="gate"),
        replace(_PX_KEPT, name="up", coded="factor"),
        replace(_FACTOR, name="f(gate)", coded="made again"),
        _PY,
        _PDY,
        Stored("d gate, up", "values", "a", BACKWARD, times=2),
    ),
    # y = x + f(x); backward sums the two branches' gradients
    "residual": (
        Stored("x, f", "values", "r", BEFORE, (Read(FORWARD),), times=2),
        _RY,
        Stored("dx, df", "values", "r", AFTER, (Read(BACKWARD),), times=2),
        _RDX,
    ),
    "dropout": (
        _PX,
        Stored("mask", "values", "mask", FORWARD, (Read(BACKWARD),), kept=True, coded="bit"),
        _PY,
        _PDY,
        _PDX,
    ),
    "scale": (_PX, _MASK, _BIAS, _PY, _PDY, _PDX),  # score scaling and masking
    "bias": (_PX, _MASK, _BIAS, _PY, _PDY, _PDX),  # and a learned bias of scores (T5)
    "mask": (_RY,),  # what a query must not see, made before the first layer
    "zero bias": (_RY,),  # of cross-attention (T5)
    "fused bias": (replace(_PY_KEPT, width="r"),),  # which a fused kernel keeps
    "heads": (_PX, _PY, _PDY, _PDX),  # a copy of queries, values or the context, one head behind the other
    "transposed": (_PX, _PY, _PDY, _PDX),  # one of keys, whose rows become columns
    "split": (_PDY, _PDX),  # one layer's queries, keys and values: views, whose gradients are copied into one
    "rotary": (_PX, _PY, _PDY, _PDX),  # rotary positions: cosine and sine are of the batch's length, no more
    # the whole table's gradient, zero where no token was; rows accumulated: read, added to, written
    "embedding": (
        Stored("token ids", "rows", "ids", BATCH, (Read(FORWARD),)),
        Stored("table rows", "values", "state", UPDATE, (Read(FORWARD),)),
        _RY,
        _RDY,
        Stored("d table", "parameters", "state", BACKWARD, needs="trained"),
        Stored("d table rows", "values", "state", BACKWARD, (Read(BACKWARD),), needs="trained"),
    ),
    # cross-entropy over (rows, vocabulary) keeps the log-probabilities
    "loss": (_PX, Stored("log p", "values", "r", FORWARD, (Read(BACKWARD),), kept=True), _PDX),
    "loss of fp32": (_PX, Stored("log p", "values", "state", FORWARD, (Read(BACKWARD),), kept=True), _PDX),
    # logits made in chunks, each with its gradient at once (Liger-Kernel): all in the forward, nothing kept
    "chunked loss": (
        Stored("logits", "values", "a", FORWARD, (Read(FORWARD),)),
        Stored("p", "values", "state", FORWARD, (Read(FORWARD),)),
        Stored("d logits", "values", "a", FORWARD, (Read(FORWARD),) * 2),
    ),
    "adapter": (  # y + scale B A x (LoRA): the scaled product is a tensor of its own
        Stored("y, B A x", "values", "a", BEFORE, (Read(FORWARD),), times=2),
        Stored("scaled", "values", "a", FORWARD, (Read(FORWARD),)),
        _PY,
        _PDY,
        Stored("d B A x", "values", "a", BACKWARD),
    ),
    "adam": (  # a row a parameter
        Stored("w", "values", "state", UPDATE, (Read(UPDATE),)),
        Stored("dw", "values", "state", BEFORE, (Read(UPDATE),)),
        Stored("moments", "values", "state", UPDATE, (Read(UPDATE),), times=2),
        Stored("working copy", "values", "w", UPDATE),
    ),
    # gradients of a table and of the projection that is tied to it
    "tied": (
        Stored("dw, d table", "values", "state", AFTER, (Read(BACKWARD),), times=2),
        Stored("their sum", "values", "state", BACKWARD),
    ),
    "parameters": (),  # parameters that move nothing but in the update
}


def _uncast(tensors: tuple[Stored, ...]) -> tuple[Stored, ...]:
    """The tensors of an operation that autocast leaves in fp32."""
    return tuple(replace(stored, width="r") if stored.width == "a" else stored for stored in tensors)


# T5's: it keeps x as it came too, where that is narrower
POINTWISE["late rms"] = (replace(_PX_KEPT, name="x as it came", width="narrow", coded="factor"), *POINTWISE["rms"])
# scores' learned bias: distances of all positions, which the table keeps
POINTWISE["position bias"] = (
    Stored("distances", "rows", "ids", FORWARD, (Read(FORWARD), Read(BACKWARD)), kept=True),
    *POINTWISE["embedding"][1:],
)
# transformers multiplies experts by torch._grouped_mm, which autocast leaves in fp32
POINTWISE |= {
    "expert gate": _uncast(POINTWISE["gate"]),
    "expert weights": _uncast((replace(_PX_KEPT, coded="factor"), *POINTWISE["activation"][1:])),
}
#: the passes whose result a policy makes again of what it keeps of them: whoever reads it keeps nothing
MADE_AGAIN = ("norm", "rms", "late rms", "activation", "gate", "product", "gelu_new", "quick_gelu", "softmax")
