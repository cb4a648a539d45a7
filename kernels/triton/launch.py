"""Launch Triton's kernels in less time of the host than Triton takes to look up a compiled kernel.

A small kernel runs for microseconds, and a training step launches hundreds. Triton looks up the compiled kernel by all
arguments, and its launchers ask the driver for the pointer of each tensor.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


class Launch:
    """A kernel with its compile-time options; its launches differ in tensors and seeds.

    Args:
        kernel: of ``triton.jit``: its first argument is a tensor, and compile-time arguments are the last.
        programs: the number of programs.
        options: the compile-time arguments, and num_warps.
    """

    def __init__(self, kernel: Any, programs: int, **options: Any) -> None:
        self.kernel = kernel
        self.programs = programs
        self.options = options
        self._argument_names = [name for name in kernel.arg_names if name not in options]
        self._compile_time = tuple(options[name] for name in kernel.arg_names if name in options)
        #: (device, number of arguments that are None) -> the launcher of the compiled kernel
        self._compiled: dict[tuple[int, int], Callable[..., None]] = {}

    def __call__(self, **arguments: Tensor | float | None) -> None:
        """Launch the kernel on the device of its first tensor, which must be the current device. The dtypes of the
        tensors, and the numbers other than seeds, must be those of the first launch."""
        values = [arguments[name] for name in self._argument_names]
        run_arguments = []
        address_bits = 0
        for value in values:
            if isinstance(value, Tensor):
                value = value.data_ptr()
                address_bits |= value
            run_arguments.append(value)
        # Triton compiles another kernel for a pointer that is no multiple of 16; newly allocated memory is one
        key = (values[0].get_device(), run_arguments.count(None)) if address_bits % 16 == 0 else None  # type: ignore[union-attr]
        run = self._compiled.get(key)  # type: ignore[arg-type]
        if run is not None:
            run(*run_arguments, *self._compile_time)
            return
        compiled = self.kernel[(self.programs,)](*values, **self.options)
        if compiled is not None and key is not None:  # None: the kernel is interpreted
            self._compiled[key] = compiled[self.programs, 1, 1]
