"""What dsq-cost draws, a picture a file."""
