"""What an experiment found: a row a run, grouped by configuration, and drawn."""
