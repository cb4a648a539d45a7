"""Benchmarks for anyone: ``python -m analysis.bench PART``, a PART a file.

kernels.py        quantise, pack and unpack against copying, and against other packages (peers.py)
formats.py        formats with a signed scale against block floating point: kernels and a step
product.py        one product of matrices by each kernel
step.py           a training step of six transformer blocks
narrow.py         the same in bfloat16
gpt.py            a training step of a GPT-2 of 124M parameters
policies.py       a training step under mesa and under gact
tiny.py           one layer too small to hide what a call costs
stash.py          bytes of a step of the blocks and of the GPT: stashed, held, at the peak
process.py        memory of the process and time of a GPT's step; process_step.py is what each process runs
cost.py           how long dsq-cost takes
format_errors.py  what rounding to a format costs, without a model
report.py         the table, the CSV and the picture of a race
"""
