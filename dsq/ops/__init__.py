"""Quantised operations: a file an operation, each made of matmul.multiply: "quantise, multiply, quantise".

sharing.py: layers that read one input share its stash.
"""
