"""Random clauses: a verb, its subject, its complements by frame, its adverbials."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Literal

from analysis.corpus import particles as par
from analysis.corpus.phrases import (
    adjectives,
    beside,
    chance,
    circumstance,
    inside,
    noun_phrase,
    object_phrase,
    subject,
    weighted,
)
from analysis.corpus.syntax import Clause, Complement, Coordination, Phrase, PrepPhrase, Pronoun
from analysis.corpus.verbs import BE, VERBS
from analysis.corpus.words import Preposition, Tense, Verb

ACTIONS = (
    "intransitive",
    "transitive",
    "dative",
    "ditransitive",
    "ditransitive-to",
    "prepositional",
    "motion",
    "putting",
)
_WITH_CLAUSE = ("clause", "question", "infinitive")

# One function a frame: it adds the verb's complements to a clause that has subject, verb, tense and negation.
Frame = Callable[[Random, Clause], Clause]


def verbs(frame: str) -> tuple[Verb, ...]:
    return (BE,) if frame == "predicate" else VERBS[frame]


def _intransitive(rng: Random, clause: Clause) -> Clause:
    return replace(clause, place=inside(rng)) if chance(rng, 0.35) else clause


def _transitive(rng: Random, clause: Clause) -> Clause:
    verb = clause.verb
    given = object_phrase(rng, verb.objects, "accusative", subject=clause.subject, negated=clause.negated)
    clause = replace(clause, accusative=given)
    somewhere = verb.frame == "transitive" and "place" not in verb.objects and chance(rng, 0.12)
    return replace(clause, place=inside(rng)) if somewhere else clause


def _dative(rng: Random, clause: Clause) -> Clause:
    given = object_phrase(rng, clause.verb.objects, "dative", subject=clause.subject, negated=clause.negated)
    return replace(clause, dative=given)


def _ditransitive(rng: Random, clause: Clause) -> Clause:
    recipient = object_phrase(rng, ("person",), "dative", subject=clause.subject, negated=clause.negated)
    given = object_phrase(rng, clause.verb.objects, "accusative", subject=clause.subject, negated=clause.negated)
    return replace(clause, dative=recipient, accusative=given)


def _prepositional(rng: Random, clause: Clause) -> Clause:
    verb = clause.verb
    phrase = noun_phrase(rng, verb.objects, back_to=clause.subject, definite=clause.negated)
    return replace(clause, oblique=PrepPhrase(Preposition(verb.preposition, ""), verb.case, phrase))


def _motion(rng: Random, clause: Clause) -> Clause:
    if chance(rng, 0.25):
        person = noun_phrase(rng, ("person",), back_to=clause.subject, definite=True)
        return replace(clause, place=PrepPhrase(Preposition("zu", "to"), "dative", person))
    place = noun_phrase(rng, ("place",), definite=True)
    return replace(clause, place=PrepPhrase(Preposition("in", "to"), "accusative", place))


def _position(rng: Random, clause: Clause) -> Clause:
    return replace(clause, place=beside(rng, "dative") if chance(rng, 0.5) else inside(rng))


def _putting(rng: Random, clause: Clause) -> Clause:
    return replace(_transitive(rng, clause), place=beside(rng, "accusative"))


def _predicate(rng: Random, clause: Clause) -> Clause:
    person = isinstance(clause.subject, Pronoun | Coordination)
    kinds = ("person",) if person else clause.subject.noun.kinds  # type: ignore[union-attr]
    said = getattr(clause.subject, "adjective", None)  # "the old man is old"
    degree = rng.choice(par.DEGREES) if chance(rng, 0.4) and not clause.negated else None
    return replace(clause, predicate=(degree, rng.choice([a for a in adjectives(kinds) if a is not said])))


def _finite_complement(kind: Literal["dass", "ob"]) -> Frame:
    def frame(rng: Random, clause: Clause) -> Clause:
        tenses: tuple[Tense, ...] = ("past",) if clause.tense == "past" else ("present", "past", "future")
        return replace(clause, complement=Complement(kind, random_clause(rng, rng.choice(tenses), embeds=False)))

    return frame


def _infinitive(rng: Random, clause: Clause) -> Clause:
    return replace(clause, complement=Complement("zu", unspoken(rng, clause.subject)))


FRAMES: dict[str, Frame] = {
    "intransitive": _intransitive,
    "transitive": _transitive,
    "stative": _transitive,
    "dative": _dative,
    "ditransitive": _ditransitive,
    "ditransitive-to": _ditransitive,
    "prepositional": _prepositional,
    "motion": _motion,
    "position": _position,
    "putting": _putting,
    "predicate": _predicate,
    "clause": _finite_complement("dass"),
    "question": _finite_complement("ob"),
    "infinitive": _infinitive,
}
_WEIGHTS = {
    "intransitive": 10,
    "transitive": 32,
    "stative": 7,
    "dative": 7,
    "ditransitive": 8,
    "ditransitive-to": 3,
    "prepositional": 8,
    "motion": 6,
    "position": 5,
    "putting": 4,
    "predicate": 8,
    "clause": 7,
    "question": 1,
    "infinitive": 4,
}


def unspoken(rng: Random, agent: Phrase) -> Clause:
    """An infinitive clause with this agent: no adverbials, no modal, no negation."""
    verb = rng.choice([verb for frame in ACTIONS for verb in verbs(frame) if "person" in verb.subjects])
    return FRAMES[verb.frame](rng, Clause(agent, verb, "present"))


def can_do(verb: Verb, agent: Phrase | None) -> bool:
    match agent:
        case None:
            return True
        case Pronoun() | Coordination():
            return "person" in verb.subjects
        case _:
            return bool(set(agent.noun.kinds) & set(verb.subjects))


def _random_verb(rng: Random, agent: Phrase | None, embeds: bool) -> Verb:
    able = {frame: [verb for verb in verbs(frame) if can_do(verb, agent)] for frame in _WEIGHTS}
    weights = {
        frame: weight for frame, weight in _WEIGHTS.items() if able[frame] and (embeds or frame not in _WITH_CLAUSE)
    }
    return rng.choice(able[weighted(rng, weights)])


def random_clause(
    rng: Random, tense: Tense, *, embeds: bool, agent: Phrase | None = None, verb: Verb | None = None
) -> Clause:
    """A finite clause; embeds: its verb may take a clause (dass, ob, zu). Given agent and verb are kept."""
    verb = verb or _random_verb(rng, agent, embeds)
    negated = verb.frame not in _WITH_CLAUSE and chance(rng, 0.14)
    clause = Clause(agent or subject(rng, verb.subjects, negated=negated), verb, tense, negated=negated)
    modals = [modal for modal in par.MODALS if tense == "present" or (tense == "past" and modal.past)]
    able = verb.frame in (*ACTIONS, "position") and "person" in verb.subjects
    if modals and able and chance(rng, 0.16):
        clause = replace(clause, modal=rng.choice(modals))
    return _with_adverbials(rng, FRAMES[verb.frame](rng, clause), 1.0 if embeds else 0.4)


def _with_adverbials(rng: Random, clause: Clause, share: float) -> Clause:
    frame, acts = clause.verb.frame, clause.verb.frame in ACTIONS and clause.modal is None
    if frame == "stative":
        return clause
    if clause.tense != "pluperfect" and frame != "predicate" and chance(rng, 0.3 * share):
        clause = replace(clause, time=rng.choice([time for time in par.TIMES if clause.tense in time.tenses]))
    elif acts and chance(rng, 0.08 * share):
        clause = replace(clause, time=circumstance(rng))
    fitting = [adverb for adverb in par.FREQUENCIES if clause.tense in adverb.tenses]
    free = clause.time is None and not clause.negated and clause.modal is None
    if fitting and free and chance(rng, 0.14 * share):
        clause = replace(clause, frequency=rng.choice(fitting))
    elif acts and frame != "putting" and chance(rng, 0.1 * share):
        clause = replace(clause, manner=rng.choice(par.MANNERS))
    return clause
