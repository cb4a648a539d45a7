"""Where a step's time goes."""
