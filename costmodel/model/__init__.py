"""One training step costed from first principles.

From what is given to what is asked:
operations.py, quantisation.py  the workload; the format and the widths
ledger.py                       each tensor of a step: who writes it, how wide, who reads it
traffic.py, arithmetic.py       bytes to and from DRAM; multiply-accumulates
roofline.py                     the least time of a step, and what bounds it
policies.py                     bits that the policies of dsq.stash keep
entries.py, memory.py           what each operation holds; memory over the step
estimate.py                     all of it for one configuration
"""
