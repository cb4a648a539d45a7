"""Text and subwords: what a training reads."""
