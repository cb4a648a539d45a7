"""What every command of this repository shares: errors of one line, files that appear whole, tables.

Needs neither torch nor pandas nor numpy.
"""
