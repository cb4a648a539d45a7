"""Step times as dsq-cost predicts them from a calibrated hardware file, beside those of running models."""
