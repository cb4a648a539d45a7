"""What the lexicon knows about a word: German and English forms, and the kinds of things it goes with.

Every field is a fact of the word that no rule gives; forms that a rule gives (3rd person -s, dative plural -n, ...)
are made in german.py and english.py.
"""

from dataclasses import dataclass
from typing import Literal

Case = Literal["nominative", "accusative", "dative", "genitive"]
Gender = Literal["m", "f", "n"]
Tense = Literal["present", "past", "future", "pluperfect"]


@dataclass(frozen=True)
class Noun:
    de: str
    gender: Gender
    de_plural: str  # "" for a noun without one (Wasser, Regen)
    genitive: str  # singular; "Jungen", "Nachbarn": the weak declension, the same form in accusative and dative
    en: str
    en_plural: str
    kinds: tuple[str, ...]  # person, food, place, ...: what verbs and adjectives ask for


@dataclass(frozen=True)
class Adjective:
    de: str
    stem: str  # what takes the endings: teuer -> teur-
    en: str
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class EnglishVerb:
    base: str
    past: str
    participle: str
    tail: str = ""  # "look FOR", "fall ASLEEP"
    pronoun_splits: bool = False  # "put it ON", but "put ON the coat"


@dataclass(frozen=True)
class Preposition:
    de: str
    en: str


@dataclass(frozen=True)
class Verb:
    frame: str  # which complements it takes: a key of grammar.FRAMES
    de: str  # infinitive without prefix and reflexive pronoun
    du: str
    er: str
    participle: str
    auxiliary: Literal["haben", "sein"]
    prefix: str  # separable: "auf" of aufstehen
    reflexive: bool
    en: EnglishVerb
    subjects: tuple[str, ...]
    objects: tuple[str, ...] = ()
    preposition: str = ""  # the one the verb governs: warten AUF
    case: Case = "accusative"  # the case of its object


@dataclass(frozen=True)
class Modal:
    de: str  # key of german.IRREGULAR
    present: str  # English; "wants to" is a full verb with do-support, "can" an auxiliary
    past: str | None  # None: no past in use here
    auxiliary: bool


@dataclass(frozen=True)
class Adverb:
    de: str
    en: str
    tenses: tuple[Tense, ...] = ("present", "past", "future")


@dataclass(frozen=True)
class Determiner:
    de: str  # the word or the stem that takes the endings of its pattern
    pattern: Literal["definite", "der-word", "ein-word", "quantifier", "uninflected", "bare"]
    en: str
    en_plural: str


@dataclass(frozen=True)
class Conjunction:
    de: str
    en: str
    tenses: tuple[tuple[Tense, Tense], ...]  # allowed (main clause, subordinate clause)


def rows(table: str) -> list[list[str]]:
    """The cells of a table of the lexicon: one row a line, cells parted by " | "."""
    return [[cell.strip() for cell in line.split(" | ")] for line in table.strip().splitlines()]
