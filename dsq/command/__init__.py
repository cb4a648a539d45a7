"""What every command of this repository shares: errors of one line, files that appear whole, tables, the processor's
name.

Needs neither torch nor pandas nor numpy.
"""
