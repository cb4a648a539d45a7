"""One training step costed from first principles. A bit width is an int, or an array with one entry a configuration.

From what is given to what is asked:
operations.py, quantisation.py  the workload; the format and the widths
ledger.py                       each tensor of a step: who writes it, how wide, who reads it
tiles.py, traffic.py            how often a product reads its operands; bytes to and from DRAM
arithmetic.py, energy.py        multiply-accumulates; joules
roofline.py                     the least time of a step, and what bounds it
stash.py, entries.py, memory.py what a policy keeps of a tensor, what each operation holds, memory over the step
estimate.py, sweep.py           all of it for one configuration, and for every one in a range
"""
