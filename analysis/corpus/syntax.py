"""The abstract side of the synchronous grammar: what a sentence says, before either language says it.

grammar.py derives these trees at random; german.py and english.py each put them into words, one rule a node type.
"""

from dataclasses import dataclass
from typing import Literal

from analysis.corpus.words import (
    Adjective,
    Adverb,
    Case,
    Conjunction,
    Determiner,
    Modal,
    Noun,
    Preposition,
    Tense,
    Verb,
)

Front = Literal["subject", "time", "place", "object", "none"]  # what stands before the German main verb


@dataclass(frozen=True)
class Pronoun:
    person: Literal[1, 2, 3]
    plural: bool
    gender: str  # m or f, told apart in the third person singular only


@dataclass(frozen=True)
class Gap:
    """The place of the relative pronoun in its clause; noun and number are those of the antecedent."""

    noun: Noun
    plural: bool


@dataclass(frozen=True)
class NounPhrase:
    noun: Noun
    plural: bool
    determiner: Determiner
    adjective: Adjective | None = None
    owner: "NounPhrase | None" = None  # der Hund DES NACHBARN; the determiner is then THE
    relative: "Clause | None" = None  # one of its phrases is a Gap, or its subject is "whose ..."


@dataclass(frozen=True)
class Coordination:
    first: NounPhrase
    second: NounPhrase


Phrase = Pronoun | Gap | NounPhrase | Coordination


@dataclass(frozen=True)
class PrepPhrase:
    preposition: Preposition
    case: Case
    phrase: Phrase


@dataclass(frozen=True)
class Complement:
    """A clause after the verb: dass, ob (finite), zu, um (infinitive, its subject unspoken)."""

    kind: Literal["dass", "ob", "zu", "um"]
    clause: "Clause"


@dataclass(frozen=True)
class Clause:
    subject: Phrase
    verb: Verb
    tense: Tense
    modal: Modal | None = None
    negated: bool = False  # by "nicht", or by "kein" in the accusative object
    accusative: Phrase | None = None
    dative: Phrase | None = None
    oblique: PrepPhrase | None = None  # the verb's own preposition: warten AUF; English has it in the verb's tail
    place: PrepPhrase | None = None
    manner: Adverb | None = None
    time: Adverb | PrepPhrase | None = None
    frequency: Adverb | None = None
    predicate: tuple[Adverb | None, Adjective] | None = None  # sehr müde
    complement: Complement | None = None


@dataclass(frozen=True)
class Subordinate:
    conjunction: Conjunction
    clause: Clause
    first: bool


@dataclass(frozen=True)
class Sentence:
    main: Clause
    front: Front = "subject"  # "none": the verb comes first
    question: Literal["", "yes-no", "why"] = ""
    subordinate: Subordinate | None = None
    second: tuple[Literal["und", "aber"], Clause] | None = None


def agreement(phrase: Phrase) -> tuple[int, bool]:
    """(person, plural) that a subject asks of its verb."""
    match phrase:
        case Pronoun(person, plural, _):
            return person, plural
        case Coordination():
            return 3, True
        case _:
            return 3, phrase.plural


def gap_role(clause: Clause) -> str:
    """The constituent that holds the relative pronoun; "" when the clause has none."""
    phrases = {
        "subject": clause.subject,
        "accusative": clause.accusative,
        "dative": clause.dative,
        "oblique": clause.oblique.phrase if clause.oblique else None,
        "place": clause.place.phrase if clause.place else None,
    }
    return next((role for role, phrase in phrases.items() if isinstance(phrase, Gap)), "")
