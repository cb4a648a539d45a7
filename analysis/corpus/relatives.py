"""Relative clauses, put on a noun phrase of a finished clause."""

from dataclasses import replace
from functools import cache
from random import Random

from analysis.corpus import particles as par
from analysis.corpus.clauses import random_clause, verbs
from analysis.corpus.phrases import Kinds, chance, nouns, weighted
from analysis.corpus.syntax import Clause, Gap, NounPhrase, Phrase, PrepPhrase
from analysis.corpus.verbs import BE
from analysis.corpus.words import Determiner, Preposition, Tense, Verb

_SHARE = 0.16
_HEADS = (par.THE, par.A, par.MANY, par.TWO)
# the role of the relative pronoun -> frames whose verbs leave that place open
_FRAMES = {
    "accusative": ("transitive", "stative"),
    "oblique": ("prepositional",),
    "dative": ("dative", "ditransitive"),
}


@cache
def _fitting(role: str, kinds: Kinds) -> tuple[Verb, ...]:
    return tuple(
        verb
        for frame in _FRAMES[role]
        for verb in verbs(frame)
        if set(kinds) & set(("person",) if frame == "ditransitive" else verb.objects)
    )


def _roles(kinds: Kinds) -> dict[str, float]:
    person = "person" in kinds
    roles: dict[str, float] = {
        "subject": 4 if person or "animal" in kinds else 0,
        "accusative": 4 if _fitting("accusative", kinds) else 0,
        "oblique": 1 if _fitting("oblique", kinds) else 0,
        "dative": 2 if person else 0,
        "place": 5 if "place" in kinds else 0,
        "owner": 1 if person else 0,
        "predicate": 1 if set(kinds) & set(BE.subjects) else 0,
    }
    return {role: weight for role, weight in roles.items() if weight}


def relative_clause(rng: Random, head: NounPhrase, tense: Tense) -> Clause:
    """One phrase is the Gap of the relative pronoun, or the subject is "dessen Hund", "whose dog"."""
    kinds = head.noun.kinds
    gap = Gap(head.noun, head.plural)
    role = weighted(rng, _roles(kinds))
    tenses: tuple[Tense, ...] = ("past",) if tense == "past" else ("present", "past")
    tense = rng.choice(tenses)
    match role:
        case "subject":
            return random_clause(rng, tense, embeds=False, agent=gap)
        case "predicate":
            return random_clause(rng, tense, embeds=False, agent=gap, verb=BE)
        case "owner":
            de = "deren" if head.plural or head.noun.gender == "f" else "dessen"
            whose = Determiner(de, "uninflected", "whose", "whose")
            agent = NounPhrase(rng.choice(nouns(("person", "animal"))), chance(rng, 0.2), whose)
            return random_clause(rng, tense, embeds=False, agent=agent)
        case "place":
            verb = rng.choice([*verbs("position"), *verbs("intransitive")])
            clause = random_clause(rng, tense, embeds=False, verb=verb)
            return replace(clause, place=PrepPhrase(Preposition("in", "in"), "dative", gap))
    clause = random_clause(rng, tense, embeds=False, verb=rng.choice(_fitting(role, kinds)))
    if role == "oblique":
        assert clause.oblique is not None
        return replace(clause, oblique=replace(clause.oblique, phrase=gap))
    return replace(clause, accusative=gap) if role == "accusative" else replace(clause, dative=gap)


def with_relative(rng: Random, clause: Clause) -> Clause:
    """The clause, with a relative clause on its subject, its accusative object or neither."""

    def headed(phrase: Phrase | None) -> Phrase | None:
        if not isinstance(phrase, NounPhrase) or phrase.determiner not in _HEADS or phrase.owner:
            return phrase
        return replace(phrase, relative=relative_clause(rng, phrase, clause.tense)) if chance(rng, _SHARE) else phrase

    agent = headed(clause.subject) or clause.subject
    if agent is not clause.subject:
        return replace(clause, subject=agent)
    return replace(clause, accusative=headed(clause.accusative))
