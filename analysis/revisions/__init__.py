"""This tree against another checkout.

against.py      times, in alternating processes (public_calls.py)
record_bits.py  bits (digests.py)
other_tree.py   runs a module of this tree on the other's dsq
"""
