"""The bytes that stash policies keep, measured from outside, and beside the papers.

bits.py       the bits of the table of operations against the error of the gradient
wanted.py     selective differentiation by who wants a gradient, on its paper's architectures
allocator.py  what malloc holds
calls.py      Python calls of a warm step: of one linear layer, and of Linear, LayerNorm, GELU, Linear
"""
