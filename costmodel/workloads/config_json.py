"""Fields of a Hugging Face config.json; every error names the file and the field."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: what ends as a bare model's class does, and is another
_NOT_BARE = ("HeadModel", "HeadsModel", "EncoderModel")


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

    def rotary(self, default: float) -> float:
        """The part of each head that rotary positions turn, by whichever field states it."""
        stated = {**self.data, **(self.data.get("rope_parameters") or {})}
        value = stated.get("partial_rotary_factor", stated.get("rotary_pct", default))
        if not isinstance(value, int | float) or not 0 < value <= 1:
            raise ValueError(f"config {self.where}: field partial_rotary_factor must be above 0 to 1, not {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._typed(name, default, "true or false"))

    def text(self, name: str, default: str = "") -> str:
        return str(self._typed(name, default, "text"))

    def _typed(self, name: str, default: object, accepted: str) -> object:
        value = self.data.get(name, default)
        if type(value) is not type(default):
            raise ValueError(f"config {self.where}: field {name} must be {accepted}, not {value!r}")
        return value

    @property
    def architecture(self) -> str:
        """The model class the config names first, e.g. BertForMaskedLM; empty: none."""
        names = self.data.get("architectures") or [""]
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise ValueError(f"config {self.where}: field architectures must be a list of names, not {names!r}")
        return names[0]

    def head(self, *known: str) -> str:
        """The first of these that ends the model class's name; empty: the config names none. Raises for another."""
        found = next((end for end in known if self.architecture.endswith(end)), "")
        if self.architecture and (not found or (found == "Model" and self.architecture.endswith(_NOT_BARE))):
            accepted = f"classes that end in {', '.join(known)} are described, not {self.architecture!r}"
            raise ValueError(f"config {self.where}: field architectures: {accepted}")
        return found

    @property
    def classes(self) -> int:
        labels = self.data.get("id2label")
        return len(labels) if isinstance(labels, dict) and labels else self.size("num_labels", default=2)


def size(*names: str, default: int | Callable[[ConfigJson], int] | None = None) -> Callable[[ConfigJson], int]:
    """Reads the first of these fields that is present."""
    return lambda config: config.size(*names, default=default(config) if callable(default) else default)


def rotary(default: float = 1.0) -> Callable[[ConfigJson], float]:
    return lambda config: config.rotary(default)


def flag(name: str, default: bool) -> Callable[[ConfigJson], bool]:
    return lambda config: config.flag(name, default)


def windows(
    name: str, every: int = 1, first: bool = False, halved: bool = False, switch: str = ""
) -> Callable[[ConfigJson], tuple[int, ...]]:
    """Reads the windows of a model's layers (Stack.windows), from the config's list of layers where it has one.

    every: without a list, one layer in so many sees all keys, the last of them, or the first; 1: none does.
    halved: the field counts the keys to both sides. switch: a flag without which nothing slides.
    """

    def read(config: ConfigJson) -> tuple[int, ...]:
        if name not in config.data or (switch and not config.flag(switch, False)):
            return ()
        window = config.size(name) // 2 + 1 if halved else config.size(name)
        kinds = config.data.get("layer_types") or config.data.get("attention_layers")
        if isinstance(kinds, list):
            return tuple(window if kind in ("sliding_attention", "local") else 0 for kind in kinds)
        if every == 1:
            return (window,)
        return (0, *(window,) * (every - 1)) if first else (*(window,) * (every - 1), 0)

    return read
