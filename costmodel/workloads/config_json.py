"""Fields of a Hugging Face config.json; every error names the file and the field."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ConfigJson:
    """The JSON, read field by field. Every method raises ValueError for a bad field."""

    data: dict[str, Any]  #: without its nulls: a null field is an absent one
    where: str

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is present, a positive whole number."""
        name = next((name for name in names if name in self.data), None)
        if name is None and default is None:
            raise ValueError(f"config {self.where}: field {names[0]} is missing")
        value = default if name is None else self.data[name]
        if type(value) is not int or (name and value < 1):
            raise ValueError(f"config {self.where}: field {name} must be a positive whole number, not {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"config {self.where}: field {name} must be true or false, not {value!r}")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self.data.get(name, default)
        if not isinstance(value, str):
            raise ValueError(f"config {self.where}: field {name} must be text, not {value!r}")
        return value

    @property
    def architecture(self) -> str:
        """The model class the config names first, e.g. BertForMaskedLM; empty: the bare model."""
        names = self.data.get("architectures") or [""]
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise ValueError(f"config {self.where}: field architectures must be a list of names, not {names!r}")
        return names[0]

    @property
    def classes(self) -> int:
        labels = self.data.get("id2label")
        return len(labels) if isinstance(labels, dict) and labels else self.size("num_labels", default=2)
