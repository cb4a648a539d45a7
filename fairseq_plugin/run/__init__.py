"""What is known of a run: what it is to cost, what its checkpoints carry, and its record.

length.py   the updates in all
state.py    what a checkpoint carries
stash.py    measures the stash
history.py  writes dsq_history.json and dsq_workload.json
"""
