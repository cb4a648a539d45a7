"""What is measured with dsq, a room a kind of measurement.

experiments/  trainings to BLEU or accuracy, with what they cost
stash/        the stash policies side by side
bench/        times and memory on this CPU
gpu/          the GPU kernels: agreement, bandwidth, steps
corpus/       the text that the demo is trained on
results/      files that these gave
"""
