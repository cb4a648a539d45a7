"""A backend that counts its calls and has another do the work."""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from dsq.kernels.backend import Backend


def counting(backend: Backend) -> tuple[Backend, Counter[str]]:
    """``backend`` with every kernel counted under its name in Backend, or the GEMM's; layers run kernel by kernel."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    kernels = {
        field.name: counted(field.name, value)
        for field in fields(backend)
        if callable(value := getattr(backend, field.name)) and field.name != "linear"
    }
    gemms = tuple(gemm._replace(run=counted(gemm.name, gemm.run)) for gemm in backend.gemms)
    return replace(backend, name=f"counting {backend.name}", gemms=gemms, linear=None, **kernels), calls
