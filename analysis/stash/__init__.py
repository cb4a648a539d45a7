"""The stash policies side by side.

compare.py    every policy on an encoder, a ResNet-20, checkpoints and compiled blocks (setups.py): bytes, time, error
bits.py       the bits of the table of operations against the error of the gradient
calls.py      Python calls of a warm step
allocator.py  what malloc holds
"""
