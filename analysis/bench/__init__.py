"""Benchmarks for anyone: ``python -m analysis.bench PART``.

races.py    the CPU kernels against copying; one product by each GEMM; steps of six blocks, converted, under policies
process.py  memory of the process and time of a GPT's step, a fresh process a row, and the README's picture
"""
