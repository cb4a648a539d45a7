"""The stash policies side by side.

compare.py  every policy on an encoder and a ResNet-20: bytes, time, gradient error (setups.py, held_setup.py,
            picture.py)
blocks.py   packed checkpoints, and policies over compiled blocks
train.py    the accuracy that a classifier reaches under each policy
allocator/  what malloc holds
"""
