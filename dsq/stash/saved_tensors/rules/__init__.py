"""A rule decides, for one call of a PyTorch function, in what form the op's saved tensors are kept.

function_mode.py  what a rule is, and the function mode that asks it
few_bits.py       the rules of ReLU, dropout and pooling: a bit an element, a narrow integer, or nothing
masked_relu.py    ReLU that makes its mask in the same pass
"""
