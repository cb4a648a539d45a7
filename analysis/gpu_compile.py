"""Compile the GPU kernels for a GPU that is not there, and read what the compiler made of them.

    python -m analysis.gpu_compile [--arch 90]

launches every kind of kernel on CPU tensors with Triton's launcher told to stop after compiling, and prints for each
its registers, its spills, its shared memory, the machine instructions a value costs, and the widest global load and
store. Nothing runs on a GPU.
"""

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
