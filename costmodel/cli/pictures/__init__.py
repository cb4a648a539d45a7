"""Pictures of dsq-cost."""
