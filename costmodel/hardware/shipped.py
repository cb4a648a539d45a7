"""The hardware profiles that come with the package."""

from importlib import resources
from importlib.resources.abc import Traversable

DEFAULT_HARDWARE = "a100-80gb"


def profile_names() -> list[str]:
    return sorted(path.name.removesuffix(".toml") for path in _folder().iterdir() if path.name.endswith(".toml"))


def profile_text(name: str) -> str:
    return (_folder() / f"{name}.toml").read_text(encoding="utf-8")


def _folder() -> Traversable:
    return resources.files("costmodel.hardware") / "profiles"
