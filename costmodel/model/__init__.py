"""One training step costed from first principles. A bit width is an int, or an array with one entry a configuration."""
