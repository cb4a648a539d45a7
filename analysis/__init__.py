"""What is measured with dsq, a room a kind of measurement.

experiments/  trainings to BLEU or accuracy, with what they cost
stash/        the stash policies side by side
memory/       the cost model's peak memory against the measured one
bench/        times and memory on this CPU
gpu/          the GPU kernels: agreement, bandwidth, steps
coverage.py   the share of the models people train that dsq.convert quantises
corpus/       the text that the demo is trained on
results/      files that these gave
figures.py    how pictures look
"""

from pathlib import Path

#: of the checkout
ROOT = Path(__file__).parents[1]
