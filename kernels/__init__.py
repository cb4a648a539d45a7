"""Quantise, pack and unpack on every backend, to the same bits. Imported as ``dsq.kernels``.

grid.py       what a format looks like to a kernel, and how a packed tensor lies in memory
reference.py  the oracle, in plain PyTorch
masks.py      masks of one bit a value, in plain PyTorch
philox.py     the random numbers of stochastic rounding
backends.py   which backend serves which device
native.py     the CPU's backend: loads the C++ of native/
native_*.py   its plans, its masks, and the passes of a linear layer in one call each
gpu.py        the GPU's backend: launches the Triton kernels of gpu_kernels.py and gpu_mask_kernels.py
ops.py        the registered operators, which the rest of dsq calls
gemm.py       products of quantised operands on the units that hold them exactly
product.py    a product whose factors are quantised on the way, and the three of a linear layer
"""

#: Hugging Face's transformers takes this folder of a checkout for its own package "kernels" and asks for the version
__version__ = "0"

if __name__ != "kernels":
    from . import gpu, native
    from .backends import REFERENCE, Backend, backend_for, register_backend, use_backend
    from .gemm import gemm_bf16, gemm_boxes, has_gemm_bf16, has_gemm_boxes
    from .grid import BIAS, MAX_BITS, NAN_EXPONENT, Grid, Layout
    from .native_layer import BackwardCall, ForwardCall, NativeLayer
    from .ops import FLOATS, apply_mask, pack, pack_mask, plain, quantize, relu, unpack, unpack_mask
    from .product import Codes, Factor, Product, Products, Way

    native.register()
    gpu.register()

__all__ = [
    "BIAS",
    "FLOATS",
    "MAX_BITS",
    "NAN_EXPONENT",
    "REFERENCE",
    "Backend",
    "BackwardCall",
    "Codes",
    "Factor",
    "ForwardCall",
    "Grid",
    "Layout",
    "NativeLayer",
    "Product",
    "Products",
    "Way",
    "apply_mask",
    "backend_for",
    "gemm_bf16",
    "gemm_boxes",
    "has_gemm_bf16",
    "has_gemm_boxes",
    "pack",
    "pack_mask",
    "plain",
    "quantize",
    "register_backend",
    "relu",
    "unpack",
    "unpack_mask",
    "use_backend",
]
