"""What graphs of torch.compile save: no mode sees their operations, and what they give has no history.

blocks.py   the calls of compiled models and blocks: what their graphs save goes through a policy's hooks
exact.py    which tensors of a graph must not be quantised, marked in the graph
packing.py  graphs that pack what they save, and unpack each tensor just before its first use
calls.py    nodes that a policy puts into a graph

exact.py and packing.py import torch._inductor, which takes seconds.
"""
