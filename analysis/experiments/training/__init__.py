"""One training: its flags, its processes, and what came out of it."""
