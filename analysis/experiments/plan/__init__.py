"""What an experiment is to run: its file, its runs and their costs."""
