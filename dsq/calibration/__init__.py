"""What products, passes and memory take on this machine, for `dsq-cost calibrate`: plain data, no import of the cost
model.

clock.py      the one way to time, forward and backward
products.py   matrix products: float32, bfloat16 under autocast, dsq's at code widths
passes.py     the pointwise operations between them, packing, the optimiser
machine.py    what the machine says of itself, its bandwidth; the whole as a hardware file's data
"""

from dsq.calibration.machine import measure_hardware

__all__ = ["measure_hardware"]
