"""What a precision configuration costs: DRAM bytes, multiplier work, roofline bound. Imports no torch.

workloads/   shapes of a training step: named models, a Hugging Face config.json, a traced model's file
model/       operations -> ledger -> traffic, arithmetic, memory -> roofline -> estimate, from first principles
planning/    how long, how large, over how many devices, on what hardware
hardware/    peaks and bandwidths, each with its source
paper/       the calibrated model that reproduces the published tables, and the tables themselves
cli/         dsq-cost
prediction.py  what a training run will cost, for those who start one
"""
