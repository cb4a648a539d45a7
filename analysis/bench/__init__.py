"""Benchmarks that anyone can run: ``python -m analysis.bench kernels|product|step|narrow|tiny|gpt|stash|cost``.

timer.py       the one timer: calls take turns, in one process
race.py        contestants as ratios to a baseline, and how far to trust them
report.py      the table, the CSV and the picture of a race
kernels.py     quantise, pack and unpack against copying, and against other packages (peers.py)
product.py     one product of matrices by each kernel
step.py        a training step of six transformer blocks
narrow.py      the same in bfloat16
gpt.py         a training step of a GPT-2 of 124M parameters
shares.py      where the time of that step goes, by perf (sampled_steps.py)
tiny.py        one layer too small to hide what a call costs
stash.py       what the layers stash, and the peak memory that the operating system sees
cost.py        how long dsq-cost takes
against.py     this tree against another checkout: times (public_calls.py)
record_bits.py this tree against another checkout: bits (digests.py)
models.py      the models that are measured, here and in analysis/stash and analysis/gpu
"""
