"""The ledger of a training step: each tensor once, with its producer, its stored width, its readers and how long it is
kept: ledger.toml. Traffic (traffic.py), the stash and peak memory (entries.py, memory.py) are sums over it.

A tensor is stored at one width, whoever reads it: an operation that wants another width converts on chip. What one
operation writes for others (y, dx) and what it reads of others (x, dy) is stored at the container width `a`; a
converted layer adds one packed copy, its stash. Under autocast the residual stream has a width `r` of its own, and each
product writes the copy of x and w that it multiplies. So every read was written, at the width it was written in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dsq.command import read_toml
from dsq.costmodel.model.operations import Gemm
from dsq.stash_bits import Role

#: width of master weights, weight gradients, biases and Adam's moments
STATE_BITS = 32
ID_BITS = 64
#: a dropout mask's entry, as CUDA's native dropout keeps it
MASK_BITS = 8

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
#: who writes a tensor: one of the operation's own phases, or one of these
BEFORE, AFTER, BATCH = "before", "after", "batch"  # an earlier operation's y; a later one's dx; the data loader

#: the gradient that a product of the backward makes -> the field of the operation that says whether it does
FOR_GRADIENT = {"dx": "x_grad", "dw": "w_grad"}

#: how a policy of dsq.stash keeps a tensor: in codes, with the bits that it gives to the role; in a bit a value;
#: not at all, since the backward recomputes it; as it is
Coded = Role | Literal["bit", "recomputed", ""]


@dataclass(frozen=True)
class Stored:
    """One tensor as it is stored: widths "q0".."q3" are packed codes, others those of traffic.widths_of."""

    name: str
    shape: str  #: two axes of M, K, N (matrix products); "values", or a field of the operation (pointwise)
    width: str
    written: str  #: FORWARD, BACKWARD or UPDATE: by this operation; else BEFORE, AFTER, BATCH
    reads: tuple[str, ...] = ()  #: a phase, or a key of FOR_GRADIENT, for each reader
    saved: bool = False  #: from the forward to the backward
    needs: str = ""  #: exists only if this field of the operation is true
    times: int = 1  #: number of such tensors
    coded: Coded = ""  #: how a policy keeps it
    copied: Coded = ""  #: how a policy keeps it if it is a 16-bit copy of an fp32 tensor; empty: as `coded` says

    @property
    def own(self) -> bool:
        """Whether this operation writes it."""
        return self.written in (FORWARD, BACKWARD, UPDATE)


def _tensors(table: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Stored, ...]]:
    """Return the tensors of each list of a table of ledger.toml."""
    tables: dict[str, tuple[Stored, ...]] = {}
    for name, entries in table.items():
        tables[name] = ()
        for entry in entries:
            if isinstance(entry, str):
                tables[name] += tables[entry]
                continue
            base = tables[entry["like"]][0] if "like" in entry else Stored(name, "values", "a", "")
            fields = {field: value for field, value in entry.items() if field != "like"}
            reads = tuple(entry.get("reads", base.reads))
            tables[name] += (replace(base, **fields | {"reads": reads}),)
    return tables


def of_width(width: str, tensors: tuple[Stored, ...]) -> tuple[Stored, ...]:
    """Return the tensors at this width in place of the container's; what is fp32 keeps no second copy in fp32."""
    tensors = tuple(stored for stored in tensors if stored.width != "cast" or width == "r")
    return tuple(replace(stored, width=width) if stored.width == "a" else stored for stored in tensors)


_DATA = read_toml(Path(__file__).with_suffix(".toml"))
RECOMPUTED: tuple[str, ...] = tuple(_DATA["recomputed"])
TIMED_AS: dict[str, str] = _DATA["timed_as"]
COMPILED: dict[str, str] = _DATA["compiled"]
FUSED: dict[str, float] = _DATA["fused"]
#: the tensors of matrix products, and the parts of those
PRODUCTS = _tensors(_DATA["products"])
#: the tensors of each pointwise operation
POINTWISE = {
    name: tensors for name, tensors in _tensors(_DATA["parts"] | _DATA["passes"]).items() if name in _DATA["passes"]
}
POINTWISE |= {name: of_width("r", POINTWISE[name]) for name in ("expert gate", "expert weights")}


def under_autocast(gemm: Gemm, tensors: tuple[Stored, ...]) -> tuple[Stored, ...]:
    """Return the tensors of a layer that casts its weight, and casts its x if x comes in fp32."""
    if gemm.weights > 1:
        tensors = tuple(replace(stored, width="state") if stored.name == "w" else stored for stored in tensors)
        return of_width("r", tensors)
    casts: dict[str, dict[str, Any]] = {"w": {"width": "a", "saved": gemm.x_grad}} | ({"x": {}} if gemm.stream else {})
    ledger: list[Stored] = []
    for stored in tensors:
        if stored.name in casts:
            ledger += PRODUCTS[f"{stored.name}_in_fp32"]
            stored = replace(stored, written=FORWARD, **casts[stored.name])
        ledger.append(stored)
    return tuple(ledger)


def of_gemm(gemm: Gemm, packs: bool) -> tuple[Stored, ...]:
    """Return the tensors of a matrix product; `packs`: its converted layers make codes of x, not a float."""
    converted = "converted_" if gemm.quantized and packs else ""
    if gemm.weight:
        return PRODUCTS[f"{converted}linear"] + (PRODUCTS["bias"] if gemm.bias else ())
    product, fused = PRODUCTS[f"{converted}product"], PRODUCTS[f"fused_{gemm.on_chip}"]
    unfused = (stored for stored in product if stored.name not in [tensor.name for tensor in fused])
    return tuple(replace(stored, coded="attention") if fused and stored.coded else stored for stored in unfused) + fused


def forward_alone(tensors: tuple[Stored, ...]) -> tuple[Stored, ...]:
    """Return the tensors of an operation without a backward: it saves nothing."""
    return tuple(
        replace(stored, reads=tuple(read for read in stored.reads if read in (FORWARD, UPDATE)), saved=False)
        for stored in tensors
        if stored.written not in (BACKWARD, AFTER)
    )
