"""Random sentences: statements, questions, subordination and coordination.

A sentence drawn here is read out twice, by german.words and english.words: a synchronous grammar in two halves.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from analysis.corpus import particles as par
from analysis.corpus.clauses import ACTIONS, can_do, random_clause, unspoken
from analysis.corpus.phrases import chance, weighted
from analysis.corpus.relatives import with_relative
from analysis.corpus.syntax import Clause, Complement, Front, NounPhrase, Sentence, Subordinate
from analysis.corpus.verbs import VERBS
from analysis.corpus.words import Tense

_TENSES: dict[Tense, float] = {"present": 5, "past": 4, "future": 1.5}


def _front(rng: Random, clause: Clause) -> Front:
    """What opens the main clause. An object does only where its case, not its place, tells it from the subject."""
    if clause.time is not None and chance(rng, 0.5):
        return "time"
    if clause.place is not None and clause.place.case == "dative" and not clause.negated and chance(rng, 0.15):
        return "place"
    target = clause.accusative if clause.accusative is not None else clause.dative
    if isinstance(target, NounPhrase) and target.determiner in (par.THE, par.THIS) and not clause.negated:
        distinct = clause.accusative is None or (target.noun.gender == "m" and not target.plural)
        if distinct and chance(rng, 0.15):
            return "object"
    return "subject"


def _with_purpose(rng: Random, clause: Clause) -> Clause:
    acts = clause.verb.frame in ACTIONS and can_do(VERBS["clause"][0], clause.subject)
    if not acts or not chance(rng, 0.07):
        return clause
    return replace(clause, complement=Complement("um", unspoken(rng, clause.subject)))


def _statement(rng: Random) -> Sentence:
    clause = random_clause(rng, weighted(rng, _TENSES), embeds=True)
    clause = with_relative(rng, _with_purpose(rng, clause))
    return Sentence(clause, front=_front(rng, clause))


def _question(rng: Random) -> Sentence:
    clause = random_clause(rng, weighted(rng, _TENSES), embeds=False)
    return Sentence(clause, front="none", question="why" if chance(rng, 0.3) else "yes-no")


def _complex(rng: Random) -> Sentence:
    conjunction = rng.choice(par.CONJUNCTIONS)
    tense, other = rng.choice(conjunction.tenses)
    clause = random_clause(rng, tense, embeds=False)
    side = Subordinate(conjunction, random_clause(rng, other, embeds=False), first=chance(rng, 0.45))
    return Sentence(clause, front="none" if side.first else _front(rng, clause), subordinate=side)


def _compound(rng: Random) -> Sentence:
    tense: Tense = "past" if chance(rng, 0.45) else "present"
    first, second = (random_clause(rng, tense, embeds=False) for _ in range(2))
    return Sentence(first, front=_front(rng, first), second=("aber" if chance(rng, 0.5) else "und", second))


_RULES: dict[Callable[[Random], Sentence], float] = {_statement: 58, _question: 10, _complex: 24, _compound: 8}


def sentence(rng: Random) -> Sentence:
    """One sentence tree, drawn from rng alone."""
    return weighted(rng, _RULES)(rng)
