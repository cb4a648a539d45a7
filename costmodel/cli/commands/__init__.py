"""What dsq-cost answers, a command a file: `run(arguments)` gives the report."""
