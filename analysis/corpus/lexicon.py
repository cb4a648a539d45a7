"""The words of words.toml, read once at import."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Noun:
    gender: str  #: m, f or n
    de: str
    genitive: str
    plural: str
    en: str
    en_plural: str
    kind: str


@dataclass(frozen=True)
class Adjective:
    de: str
    stem: str
    en: str


@dataclass(frozen=True)
class Verb:
    prefix: str  #: separable
    de: str  #: infinitive without it
    er: str
    participle: str
    sein: bool  #: its perfect is formed with sein
    en: str
    past: str
    tail: str = ""  #: wake UP
    splits: bool = False  #: pick him UP
    subjects: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    datives: tuple[str, ...] = ()


def entries(table: str) -> Iterator[tuple[str, str]]:
    """(German, English) of each entry."""
    for entry in table.split(";"):
        german, _, english = entry.partition(" = ")
        yield german.strip(), english.strip()


def with_s(word: str) -> str:
    """The plural of a regular noun; the third person of a verb."""
    if word[-1] == "y" and word[-2] not in "aeou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "sh", "ch", "x", "o")) else "s")


def _nouns() -> Iterator[Noun]:
    for kind, table in _WORDS["nouns"].items():
        for german, english in entries(table):
            gender, de, *endings = german.split()
            genitive, plural = (de + form[1:] if form.startswith("-") else form for form in endings)
            en, *irregular = english.split()
            yield Noun(gender, de, genitive, plural, en, irregular[0] if irregular else with_s(en), kind)


def _verbs() -> Iterator[Verb]:
    for group in _WORDS["verbs"]:
        kinds = [tuple(group.get(role, "").split()) for role in ("subject", "accusative", "dative")]
        for german, english in entries(group["words"]):
            infinitive, *irregular = german.split()
            prefix, _, base = infinitive.rpartition("|")
            er = base[:-2] + ("et" if base[-3] in "dt" else "t")
            er, participle = irregular or (er, f"{prefix}ge{er}")
            en, *rest = english.split()
            tail = rest.pop() if rest and rest[-1][0] in "+~" else ""
            regular = en + "d" if en[-1] == "e" else re.sub("([^aeo])y$", r"\1i", en) + "ed"
            past = rest[0] if rest else regular
            forms = prefix, base, er, participle.rstrip("*"), participle.endswith("*"), en, past
            yield Verb(*forms, tail[1:], tail.startswith("~"), *kinds)


NOUNS = tuple(_nouns())
TIMES = {tense: tuple(entries(table)) for tense, table in _WORDS["times"].items()}
MODIFIERS = tuple(entries(_WORDS["compounds"]["modifiers"]))
#: (German, case, English, kinds)
PREPOSITIONS = tuple((german, *rest) for german, rest in _WORDS["prepositions"].items())
ADJECTIVES = {
    kind: [Adjective(de.split()[0], de.split()[-1], en) for de, en in entries(table)]
    for kinds, table in _WORDS["adjectives"].items()
    for kind in kinds.split()
}
VERBS = tuple(_verbs())
BE = Verb("", "sein", "ist", "", True, "be", "was", subjects=("person", "animal", "thing", "text", "place", "food"))
