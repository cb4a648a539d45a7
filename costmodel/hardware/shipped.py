"""The hardware profiles that come with the package."""

from pathlib import Path

DEFAULT_HARDWARE = "a100-80gb"
_FOLDER = Path(__file__).with_name("profiles")


def profile_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def profile_text(name: str) -> str:
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
