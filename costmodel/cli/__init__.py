"""dsq-cost: main.py parses, commands/ give an Answer that output.py prints, pictures/ draw.

main.py               the command line; one import for the command that was asked for
query.py              what the arguments of every command describe: workload, hardware, precisions
run_history.py        what a run wrote down
"""
