"""Launch Triton's kernels in less time of the host's than Triton takes to find what it compiled.

A small kernel runs for microseconds, and a training step launches hundreds. Triton looks up by all arguments which
compiled kernel they want, and its launchers ask the driver of each tensor what its pointer is.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Launch:
    """A kernel with all that follows from sizes, types and options; its launches differ in tensors and numbers.

    Args:
        kernel: of ``triton.jit``: tensors come first, then numbers, then what is known when it is compiled.
        programs: how many run.
        options: the arguments of compile time, and num_warps.
    """

    def __init__(self, kernel: Any, programs: int, **options: Any) -> None:
        self.kernel, self.programs, self.options = kernel, programs, options
        self._last = tuple(options[name] for name in kernel.arg_names if name in options)
        #: (device, tensors not given) -> what launches the compiled kernel
        self._compiled: dict[tuple[int, int], Callable[..., None]] = {}

    def __call__(self, tensors: Sequence[Tensor | None], *numbers: float) -> None:
        """Launch it on the device of the first tensor, which is the current one. The tensors' types and the numbers are
        those of the first launch, seeds aside."""
        pointers, all_bits = [], 0
        for x in tensors:
            pointer = None if x is None else x.data_ptr()
            pointers.append(pointer)
            all_bits |= pointer or 0
        # Triton compiles another kernel for a pointer that is no multiple of 16; memory that was just taken is one
        known = (tensors[0].get_device(), pointers.count(None)) if all_bits % 16 == 0 else None  # type: ignore[union-attr]
        run = self._compiled.get(known)  # type: ignore[arg-type]
        if run is not None:
            run(*pointers, *numbers, *self._last)
            return
        compiled = self.kernel[(self.programs,)](*tensors, *numbers, **self.options)
        if compiled is not None and known is not None:  # as it is where the kernel is interpreted
            self._compiled[known] = compiled[self.programs, 1, 1]
