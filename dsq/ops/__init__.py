"""Quantized operations: products.py (of matrices, of two activations, of attention), linear_passes.py (a linear layer's
passes, planned once), tensor_parallel.py (layers whose weight is sharded).
"""
