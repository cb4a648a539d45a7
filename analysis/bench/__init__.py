"""Benchmarks for anyone: ``python -m analysis.bench PART``.

steps.py    training steps: six blocks, converted and under policies
kernels.py  quantise, pack and unpack against copying; one product by each GEMM
process.py  memory of the process and time of a GPT's step, a fresh process a row, and the README's picture
"""
