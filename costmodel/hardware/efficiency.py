"""Shares of a hardware file's rates that a training step reaches: the constants of the time model.

`python -m analysis.published fit` fits `memory` and `exposed`, and the share of attention that the files of the A100
and the H100 state, to one half of the published trainings; the other half judges them (docs/cost-model.md). The other
constants have the sources that stand beside them.
"""

from dataclasses import dataclass, replace

MICRO = 1e-6


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's rates that a step reaches."""

    #: rate at which a step's kernels move tensors, as a share of the file's bandwidth: PyTorch's kernels move some
    #: more often than the ledger counts
    memory: float
    #: share of the shorter of a kernel's two times, of computing and of moving, that the longer does not hide
    serial: float
    #: copies in 16 bits that quantising an operand writes, where units multiply floats
    copies: float
    #: share of the time of sending that a step waits for, though it computes meanwhile
    exposed: float
    #: least seconds of a kernel: PyTorch does not launch one sooner
    launch: float
    #: seconds of each hop of a message that goes round a ring of devices, inside a node and between two nodes
    hop: float
    hop_between_nodes: float
    #: eight of ten steps take between these multiples of the time that is expected
    low: float = 1
    high: float = 1


#: launch: assumed. hops: NVIDIA/nccl, src/graph/tuning.cc: ring, protocol Simple, NVLink 3.4 us, network 14 us. low and
#: high: the published trainings that were not fitted
TYPICAL = Efficiency(
    memory=0.62,
    serial=1,
    copies=1,
    exposed=0.74,
    launch=8 * MICRO,
    hop=3.4 * MICRO,
    hop_between_nodes=14 * MICRO,
    low=0.93,
    high=1.08,
)
#: for --datasheet, which takes no efficiency
IDEAL = Efficiency(memory=1, serial=0, copies=0, exposed=1, launch=0, hop=0, hop_between_nodes=0)
#: for rates that were measured: python -m analysis.step_time gives low and high
MEASURED = replace(IDEAL, low=1.0, high=1.15)
