"""What a training step reaches of the rates that a hardware file states: the constants of the time model.

`python -m analysis.published fit` fits `memory` and `exposed`, and the share of attention that the files of the A100
and the H100 state, to one half of the published trainings; the other half judges them (docs/cost-model.md). The other
constants have the sources that stand beside them.
"""

from dataclasses import dataclass

MICRO = 1e-6


@dataclass(frozen=True)
class Efficiency:
    """What a step reaches of a device's rates."""

    #: rate at which a step's kernels move their tensors, as a share of the file's bandwidth: the ledger counts each
    #: tensor once, and PyTorch's kernels move some twice
    memory: float
    #: share of the shorter of a kernel's two times, of computing and of moving, that the longer does not hide
    serial: float
    #: share of the time of sending that a step waits for, though it computes meanwhile
    exposed: float
    #: least seconds of a kernel: PyTorch does not launch one sooner
    launch: float
    #: seconds of each hop of a message that goes round a ring of devices, inside a node and between two nodes
    hop: float
    hop_between_nodes: float


#: launch: assumed. hops: NVIDIA/nccl, src/graph/tuning.cc: ring, protocol Simple, NVLink 3.4 us, network 14 us
TYPICAL = Efficiency(
    memory=0.80, serial=1, exposed=0.37, launch=8 * MICRO, hop=3.4 * MICRO, hop_between_nodes=14 * MICRO
)
#: for rates that were measured in steps, and for --datasheet
IDEAL = Efficiency(memory=1, serial=0, exposed=1, launch=0, hop=0, hop_between_nodes=0)
