"""Trainers that dsq works inside: a file a trainer, imported by whoever uses that trainer."""
