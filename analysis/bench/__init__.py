"""Benchmarks that anyone can run: ``python -m analysis.bench kernels|step|stash``.

racing.py   how things are timed: in turns, in one process, as ratios to a baseline
report.py   the table, the CSV and the picture of a race
kernels.py  quantise, pack and unpack against copying, and against other packages
step.py     a training step of six transformer blocks, and a tiny layer
stash.py    what the layers stash, and the peak memory that the operating system sees
peers.py    those other packages, where they are installed
"""
