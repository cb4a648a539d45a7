"""Quantised operations: a file an operation, each made of matmul.multiply: "quantise, multiply, quantise"."""
