"""dsq: dynamic stashing quantization for PyTorch. Public names are in __init__.pyi and loaded when asked for: formats
and precisions come without torch.

What a user asks for   config.py, precision.py, scheduler.py (when the level rises), dynamic.py (a run in one hand)
A model                conversion.py, layers/; left_plain.py, coverage.py and gradient_check.py (how much, how well)
The operations         linear.py (the idea on one screen), functional.py, packing.py; below: quantizers.py, ops/,
                       kernels/, formats.py
What autograd saves    stash/
Around it              integrations/, workload/ (for dsq-cost), command.py, arguments.py;
                       process_memory.py (freed memory goes back to the system)
"""

import lazy_loader

from dsq.process_memory import ask_for_huge_pages

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

ask_for_huge_pages()  # before PyTorch's first tensor; DSQ_ALLOCATOR=0 declines
