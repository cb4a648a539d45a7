"""How anything here is timed.

timer.py      the one timer: calls take turns, in one process
race.py       contestants as ratios to a baseline, and how far to trust them
allocator.py  how a process that is timed treats its memory
"""
