"""What is known of a run: what it is to cost, what its checkpoints carry, and its record.

cost.py     the cost, said before the first update
state.py    what a checkpoint carries
stash.py    measures the stash
history.py  writes dsq_history.json and dsq_workload.json
"""
