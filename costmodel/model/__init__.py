"""One training step costed from first principles."""
