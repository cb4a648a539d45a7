"""Random phrases: noun phrases, subjects, objects, places.

Probabilities and weights, here and in clauses.py, relatives.py and grammar.py, are plain numbers where they are used.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import TypeVar

from analysis.corpus import particles as par
from analysis.corpus.nouns import ADJECTIVES, NOUNS
from analysis.corpus.syntax import Coordination, Gap, NounPhrase, Phrase, PrepPhrase, Pronoun, agreement
from analysis.corpus.words import Adjective, Case, Determiner, Noun, Preposition

T = TypeVar("T")
Kinds = tuple[str, ...]

_PERSONAL: tuple[Pronoun, ...] = (
    Pronoun(1, False, ""),
    Pronoun(2, False, ""),
    Pronoun(3, False, "m"),
    Pronoun(3, False, "f"),
    Pronoun(1, True, ""),
    Pronoun(2, True, ""),
    Pronoun(3, True, ""),
)


def chance(rng: Random, share: float) -> bool:
    return rng.random() < share


def weighted(rng: Random, weights: Mapping[T, float]) -> T:
    return rng.choices(list(weights), list(weights.values()))[0]


@cache
def nouns(kinds: Kinds) -> tuple[Noun, ...]:
    return tuple(noun for noun in NOUNS if set(kinds) & set(noun.kinds))


@cache
def adjectives(kinds: Kinds) -> tuple[Adjective, ...]:
    return tuple(adjective for adjective in ADJECTIVES if set(kinds) & set(adjective.kinds))


def possessive(owner: Phrase) -> Determiner | None:
    """The possessive that points back at the owner: sein or ihr by grammatical gender, his, her or its by sense.

    None where German speakers disagree (das Mädchen and ihr or sein).
    """
    person, plural = agreement(owner)
    if person != 3:
        return par.POSSESSIVES[person, plural]
    if plural:
        return Determiner("ihr", "ein-word", "their", "their")
    if isinstance(owner, Pronoun):
        human, gender = True, owner.gender
    else:
        assert isinstance(owner, NounPhrase | Gap)
        human, gender = "person" in owner.noun.kinds, owner.noun.gender
    if human and gender == "n":
        return None
    english = {"m": "his", "f": "her"}[gender] if human else "its"
    return Determiner("ihr" if gender == "f" else "sein", "ein-word", english, english)


def noun_phrase(
    rng: Random, kinds: Kinds, *, back_to: Phrase | None = None, definite: bool = False, owners: bool = True
) -> NounPhrase:
    """A noun of one of the kinds, with what belongs to it.

    back_to: a phrase that a possessive may point at; definite: the, this and possessives only;
    owners: a genitive may follow.
    """
    noun = rng.choice(nouns(kinds))
    countable = bool(noun.de_plural)
    plural = countable and chance(rng, 0.25)
    anyone = rng.choice(list(par.POSSESSIVES.values()))
    choices = {par.THE: 50.0, par.THIS: 7.0, anyone: 5.0}
    own = possessive(back_to) if back_to else None
    if own:
        choices[own] = 10.0
    if not definite and plural:
        choices |= {par.BARE: 20, par.MANY: 3, par.SOME: 3, par.TWO: 2, par.THREE: 1}
    elif not definite and countable:
        choices |= {par.A: 20, par.EVERY: 3}
    elif not definite and {"food", "drink"} & set(noun.kinds):
        choices[par.BARE] = 20
    fitting = adjectives(noun.kinds)
    adjective = rng.choice(fitting) if fitting and chance(rng, 0.3) else None
    phrase = NounPhrase(noun, plural, weighted(rng, choices), adjective)
    if owners and phrase.determiner == par.THE and chance(rng, 0.14):
        return replace(phrase, owner=noun_phrase(rng, ("person",), definite=True, owners=False))
    return phrase


def subject(rng: Random, kinds: Kinds, *, negated: bool) -> Phrase:
    """negated: the verb is; "jeder Mann schläft nicht" is avoided."""
    if "person" in kinds and chance(rng, 0.28):
        return rng.choice(_PERSONAL)
    if "person" in kinds and chance(rng, 0.07):
        return Coordination(noun_phrase(rng, ("person",), definite=True), noun_phrase(rng, ("person",), definite=True))
    return noun_phrase(rng, kinds, definite=negated)


def _same_person(one: Phrase, other: Phrase) -> bool:
    """ich and mich, wir and mich: a pronoun object that would have to be reflexive, or nearly."""
    return agreement(one)[0] == agreement(other)[0] and (isinstance(one, Pronoun) and isinstance(other, Pronoun))


def object_phrase(rng: Random, kinds: Kinds, case: Case, *, subject: Phrase, negated: bool = False) -> Phrase:
    """A noun phrase, or a pronoun where it cannot be misread (the accusative "sie" could be her, it or them).

    negated: an indefinite accusative takes "kein" and carries the negation of the clause.
    """
    if "person" in kinds and chance(rng, 0.15):
        clear = [p for p in _PERSONAL if case == "dative" or p.person != 3 or p.gender == "m"]
        apart = [p for p in clear if not _same_person(p, subject)]
        if apart:
            return rng.choice(apart)
    takes_kein = negated and case == "accusative"
    phrase = noun_phrase(rng, kinds, back_to=subject, definite=negated and not takes_kein)
    if takes_kein and phrase.determiner in (par.A, par.BARE):
        return replace(phrase, determiner=par.NO)
    if takes_kein and phrase.determiner in (par.EVERY, par.MANY, par.SOME, par.TWO, par.THREE):
        return replace(phrase, determiner=par.THE)
    return phrase


def inside(rng: Random) -> PrepPhrase:
    return PrepPhrase(Preposition("in", "in"), "dative", noun_phrase(rng, ("place",), definite=True))


def beside(rng: Random, case: Case) -> PrepPhrase:
    """auf dem Tisch (where, dative), auf den Tisch (whereto, accusative)."""
    return PrepPhrase(rng.choice(par.ON_FURNITURE), case, noun_phrase(rng, ("furniture",), definite=True, owners=False))


def circumstance(rng: Random) -> PrepPhrase:
    """wegen des Regens, nach dem Konzert."""
    preposition, case, kinds = rng.choice(par.CIRCUMSTANCES)
    return PrepPhrase(preposition, case, noun_phrase(rng, kinds, definite=True, owners=False))
