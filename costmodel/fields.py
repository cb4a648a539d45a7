"""Fields of what TOML and JSON files hold: a missing or mistyped one is an error that names it."""

from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from dsq.arguments import number, whole_number

T = TypeVar("T")
#: of numbers: what is made of others overflows
SMALLEST, LARGEST = 1e-30, 1e30
_KINDS = {str: "text", bool: "true or false", dict: "a table", list: "a list of tables"}


@dataclass(frozen=True)
class Fields:
    """The fields of a table; a name with a dot is that of a field in a table in it. Null is as good as absent.

    Methods raise ValueError for a bad field. A default stands for a field that is absent, or whose table is.
    """

    data: Any
    label: str = ""  #: before the names of its fields, as "peak[0]."

    def find(self, name: str) -> Any:
        """Return a field as it stands; None: it is absent."""
        value = self.data
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        value: T = self._value(name, default)
        self.refuse(type(value) is not kind, f"{name} must be {_KINDS[kind]}, not {value!r}")
        return value

    def whole(self, name: str, default: int | None = None, least: int = 1, most: float = inf) -> int:
        value: int = self._value(name, default)
        return value if value is default else whole_number(self.label + name, value, least, most)

    def number(self, name: str, default: float | None = None, least: float = SMALLEST, most: float = LARGEST) -> float:
        value: float = self._value(name, default)
        return value if value is default else float(number(self.label + name, value, least=least, most=most))

    def table(self, name: str) -> "Fields":
        return Fields(self.find(name), f"{self.label}{name}.")

    def tables(self, name: str) -> list["Fields"]:
        """Return the tables of a list; none where it is absent."""
        return [Fields(entry, f"{self.label}{name}[{index}].") for index, entry in enumerate(self.get(name, list, []))]

    def refuse(self, condition: object, text: str) -> None:
        """Raise ValueError with the text, which begins with a field's name, if the condition holds."""
        if condition:
            raise ValueError(self.label + text)

    def _value(self, name: str, default: Any) -> Any:
        if default is not None and self.find(name.partition(".")[0]) is None:
            return default
        value = self.find(name)
        self.refuse(value is None, f"{name} is missing")
        return value
