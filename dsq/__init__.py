"""dsq: dynamic stashing quantization for PyTorch. Public names are in __init__.pyi and loaded when asked for: formats
and precisions come without torch."""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
