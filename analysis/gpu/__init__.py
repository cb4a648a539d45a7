"""The GPU kernels, on a GPU and without one: ``python -m analysis.gpu.check``."""
