"""Where the shapes of a training step come from."""
