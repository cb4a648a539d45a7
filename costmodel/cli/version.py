"""The version: of the installed package, or of the checkout that this runs from."""

import tomllib
from importlib import metadata
from pathlib import Path


def version() -> str:
    """As pyproject.toml states it."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    return metadata.version("dsq-torch")
