"""Answers to the questions of users.

methods.py, step.py  the methods of training that are compared; how long a step takes
batch.py             how large the batch may be
parallel.py          a step over several devices
"""
