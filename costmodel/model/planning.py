"""Does it fit, how long does a step take, how large may the batch be: memory, time and communication of a method."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from costmodel.hardware.hardware import Hardware
from costmodel.model.arithmetic import matmuls
from costmodel.model.entries import in_layer
from costmodel.model.ledger import BACKWARD, FORWARD, STATE_BITS
from costmodel.model.memory import Memory, Method, packed_values, peak_memory
from costmodel.model.operations import Workload
from costmodel.model.quantisation import Setup
from costmodel.model.roofline import step_floor
from costmodel.model.stash import POLICIES
from costmodel.model.traffic import transfers
from dsq.formats import DEFAULT, WIDEST, Identity, format_class
from dsq.precision import DEFAULT_LEVELS, Precision

FP32 = Setup(Identity(WIDEST), Precision(32, 32, 32, 32))
BF16 = Setup(Identity(WIDEST), Precision(16, 16, 16, 16))
AUTOCAST = replace(BF16, autocast=True)
DSQ = format_class(DEFAULT)(WIDEST)
LEVELS = (Precision(16, 4, 4, 16), *DEFAULT_LEVELS)  # the paper's last, and ours
#: the methods that a plan compares unless told
USUAL = (
    Method("fp32", FP32),
    Method("bf16 autocast", AUTOCAST),
    Method("bf16", BF16),
    *(Method(f"dsq {level}", Setup(DSQ, level)) for level in LEVELS),
    *(Method(f"bf16, {name}", BF16, stash=stash) for name, stash in POLICIES.items()),
    Method("bf16, recompute", BF16, recompute=True),
    Method("bf16, recompute, bfp 4", BF16, stash=POLICIES["bfp 4"], recompute=True),
)
MOST_SEQUENCES = 2**20
#: from one batch that is tried to the next, until one does not fit
GROWTH = 6


@dataclass(frozen=True)
class Step:
    """A step's least time on each device, in seconds."""

    compute: float  #: the roofline's floor, recomputation included
    packing: float  #: and unpacking of what a policy keeps; 0: none, or never measured
    communication: float
    bound: str

    @property
    def seconds(self) -> float:
        """Nothing overlapped."""
        return self.compute + self.packing + self.communication


def step_time(workload: Workload, method: Method, hardware: Hardware) -> Step:
    """Raises ValueError where several devices have no link."""
    moved, multiplied = transfers(workload, method.setup, hardware.on_chip_bytes), matmuls(workload, method.setup)
    total = step_floor(moved, multiplied, hardware, method.setup.container_bits)
    seconds = float(total.seconds)
    if method.recompute:
        seconds += _layers_forward(workload, method, hardware)
    bound = "memory" if total.memory_bound else "compute"
    communicated = communication_bytes(workload, method)
    if communicated and not hardware.link:
        raise ValueError(f"hardware {hardware.name!r} states no link: --devices needs [link] gb_per_s in its file")
    talking = communicated / hardware.link if communicated else 0.0
    packing = packing_seconds(workload, method, hardware) or 0.0
    return Step(seconds, packing, talking, "link" if talking > seconds + packing else bound)


def packing_seconds(workload: Workload, method: Method, hardware: Hardware) -> float | None:
    """Of packing what the method's policy keeps, and unpacking it; None: the hardware file does not know."""
    if not method.stash:
        return 0.0
    found = [hardware.passes.get(("pack", method.stash.codes, phase)) for phase in (FORWARD, BACKWARD)]
    values = packed_values(workload, method)
    return sum(pack.seconds(size) for pack in found if pack for size in values) if all(found) or not values else None


def _layers_forward(workload: Workload, method: Method, hardware: Hardware) -> float:
    """Seconds of the forward of all layers, which recomputation runs again."""
    again = workload.recomputing_layers().operations
    layers = replace(workload, operations=tuple(op for op in again if in_layer(op)))
    moved = [t for t in transfers(layers, method.setup, hardware.on_chip_bytes) if t.phase == FORWARD]
    multiplied = [product for product in matmuls(layers, method.setup) if product.name == "forward"]
    return float(step_floor(moved, multiplied, hardware, method.setup.container_bits).seconds)


def communication_bytes(workload: Workload, method: Method) -> float:
    """What a device sends in a step: gradients summed in a ring, 2 (N-1)/N of them; shared-out weights gathered, once
    (ZeRO-1, 2) or before the forward and the backward each (ZeRO-3), with gradients scattered (Rajbhandari et al.,
    2020, section 7)."""
    part = (method.devices - 1) / method.devices
    gradients = workload.trained * STATE_BITS / 8
    weights = workload.parameters * float(method.setup.container_bits) / 8
    if not method.zero:
        return 2 * part * gradients
    return part * (gradients + weights * (2 if method.zero == 3 else 1))


def largest_batch(build: Callable[[int], Workload], method: Method, budget: float) -> int:
    """The most sequences a device whose step fits the budget; 0: not even one."""
    low, high = 0, MOST_SEQUENCES + 1  # this fits, this does not
    tried, size = 0, 1
    found: dict[int, Memory] = {}
    while high - low > 1:
        found[size] = peak_memory(build(size), method)
        low, high = (size, high) if found[size].peak <= budget else (low, size)
        guess = _reaching(budget, tried, found[tried], size, found[size]) if tried else size * GROWTH
        tried, size = size, min(max(guess, low + 1), high - 1)
    return low


def _reaching(budget: float, tried: int, before: Memory, size: int, now: Memory) -> int:
    """The batch whose peak is the budget if each moment's memory grows in a straight line, as it does but for
    rounding."""
    slopes = (now.totals - before.totals) / (size - tried)
    grows = slopes > 0
    more = (budget - now.totals[grows]) // slopes[grows]
    return min(MOST_SEQUENCES, size + int(more.min(initial=MOST_SEQUENCES)))
