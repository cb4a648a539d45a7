"""What a step costs, measured from outside.

allocator.py  what malloc holds
calls.py      Python calls of a warm step: of one linear layer, and of Linear, LayerNorm, GELU, Linear
"""
