"""dsq: dynamic stashing quantization for PyTorch. Public names are in __init__.pyi and loaded when asked for: formats
and precisions come without torch. linear.py has the idea on one screen, docs/architecture.md the map of all files.
"""

import lazy_loader

from dsq.process_memory import ask_for_huge_pages

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

ask_for_huge_pages()  # before PyTorch's first tensor; DSQ_ALLOCATOR=0 declines
