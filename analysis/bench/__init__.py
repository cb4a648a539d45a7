"""Benchmarks that anyone can run: ``python -m analysis.bench kernels|product|step|narrow|tiny|gpt|stash|cost``.

kernels.py        quantise, pack and unpack against copying, and against other packages (peers.py)
product.py        one product of matrices by each kernel
step.py           a training step of six transformer blocks
narrow.py         the same in bfloat16
gpt.py            a training step of a GPT-2 of 124M parameters
tiny.py           one layer too small to hide what a call costs
stash.py          bytes of a step of the blocks and of the GPT: stashed, held, at the peak
cost.py           how long dsq-cost takes
format_errors.py  what rounding to a format costs, without a model
report.py         the table, the CSV and the picture of a race
"""
