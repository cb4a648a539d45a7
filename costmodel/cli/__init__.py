"""dsq-cost: main.py parses, a file a command answers with a Report, output.py prints it."""
