"""Offsets to the seed of a call: no two tensors in it share random numbers."""


class SeedOffset:
    """The offset of each operand of a layer's products, and of the signs of a Hadamard transform, which both operands
    of a product share."""

    X, W, X_FOR_DW, W_FOR_DX, DY_FOR_DX, DY_FOR_DW, DX, SIGNS = range(8)
    NUMBER = 8  #: of seeds that one call may take
