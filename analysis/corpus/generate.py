"""Draws sentence pairs by a seed, and writes them as train, valid and test text."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

from analysis.corpus.grammar import (
    MODALS,
    Clause,
    Gap,
    NounPhrase,
    Phrase,
    Pronoun,
    as_text,
    english,
    german_final,
    german_main,
    pronoun_of,
)
from analysis.corpus.lexicon import ADJECTIVES, BE, MODIFIERS, NOUNS, PREPOSITIONS, TIMES, VERBS, Verb
from dsq.command.files import write_text

SUBORDINATING = (("weil", "because"), ("obwohl", "although"), ("wenn", "when"), ("bevor", "before"))
COORDINATING = (("und", "and"), ("aber", "but"))
PERCEIVING = [verb for verb in VERBS if verb.prefix + verb.de in ("sehen", "hören", "vergessen", "verstehen")]
#: form of a sentence -> how often it is drawn
FORMS = {"one": 30, "question": 12, "and": 20, "subordinate": 18, "subordinate first": 10, "dass": 10}


def pairs(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (German, English) sentences, none twice; the same for the same seed."""
    draw, seen = Random(seed), set()
    while True:
        pair = _sentence(draw)
        if pair not in seen:
            seen.add(pair)
            yield pair


def write(folder: Path, sentences: int, held_out: int, seed: int) -> None:
    """Write train (``sentences`` pairs), valid and test (``held_out`` each) as SPLIT.de and SPLIT.en into folder."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = pairs(seed)
    for split, count in (("test", held_out), ("valid", held_out), ("train", sentences)):
        part = list(islice(drawn, count))
        for side, language in enumerate(("de", "en")):
            write_text(folder / f"{split}.{language}", "".join(pair[side] + "\n" for pair in part))


def _sentence(draw: Random) -> tuple[str, str]:
    first, form = _clause(draw), draw.choices(list(FORMS), list(FORMS.values()))[0]
    second = _clause(draw, first.subject if draw.random() < 0.6 else None)
    (de, en), end, front = draw.choice(SUBORDINATING), ".", draw.choice(_fronts(first))
    source, target = german_main(first, front), english(first, front)
    match form:
        case "question":
            why, end = draw.choice((("warum", "why"), ("", ""))), "?"
            source, target = f"{why[0]} {german_main(first, '')}", f"{why[1]} {english(first, inverted=True)}"
        case "and":
            (de, en), later = draw.choice(COORDINATING), "time" if second.time else "subject"
            source += f" , {de} {german_main(second, later)}"
            target += f" , {en} {english(second, later)}"
        case "subordinate":
            source += f" , {de} {german_final(second)}"
            target += f" {en} {english(second)}"
        case "subordinate first":
            source = f"{de} {german_final(first)} , {german_main(second, '')}"
            target = f"{en} {english(first)} , {english(second)}"
        case "dass":
            knows = Clause(_phrase(draw, ("person",)), draw.choice(PERCEIVING), negated=draw.random() < 0.2)
            source = f"{german_main(knows)} , dass {german_final(first)}"
            target = f"{english(knows)} that {english(first)}"
    return as_text(source, end), as_text(target, end)


def _fronts(clause: Clause) -> list[str]:
    """What may come first; of objects one whose form shows that it is no subject (den, einen, keinen)."""
    thing = clause.accusative
    found = ["subject", "subject", *["time"] * 2 * bool(clause.time), *["place"] * bool(clause.place)]
    if isinstance(thing, NounPhrase) and not thing.plural and thing.noun.gender == "m" and not thing.relative:
        found.append("accusative")
    return found


def _verb(draw: Random, kind: str) -> Verb:
    """A verb whose subject may be of this kind, "" for any."""
    return draw.choice([verb for verb in (*VERBS, *[BE] * 12) if not kind or kind in verb.subjects])


def _clause(draw: Random, about: Phrase | None = None) -> Clause:
    """A clause about anyone, or about whom the pronoun for ``about`` stands for."""
    verb = _verb(draw, _kind(about) if about else "")
    subject = about or _phrase(draw, verb.subjects)
    return _filled(draw, Clause(Pronoun(pronoun_of(about)) if about else subject, verb), _kind(subject))


def _relative(draw: Random, gap: Gap) -> Clause:
    """A clause with the gap as its subject or accusative."""
    if draw.random() < 0.5:
        return _filled(draw, Clause(gap, _verb(draw, _kind(gap))), _kind(gap), nested=True)
    verb = draw.choice([verb for verb in VERBS if _kind(gap) in verb.objects])
    subject = _phrase(draw, verb.subjects, nested=True)
    return _filled(draw, Clause(subject, verb, accusative=gap), _kind(subject), nested=True)


def _kind(phrase: Phrase) -> str:
    return "person" if isinstance(phrase, Pronoun) else phrase.noun.kind


def _filled(draw: Random, clause: Clause, kind: str, nested: bool = False) -> Clause:
    """The clause, whose subject is of ``kind``, with objects, adverbials, tense, negation and modal drawn."""
    verb, subject = clause.verb, clause.subject
    tense, negated = draw.choice(("present", "present", "past", "past", "future")), draw.random() < 0.2
    modal = draw.choice(list(MODALS)) if tense == "present" and verb is not BE and draw.random() < 0.25 else ""
    accusative, dative, place = clause.accusative, clause.dative, None
    if verb.objects and accusative is None:
        accusative = _phrase(draw, verb.objects, nested, subject, "I we he")
        if negated and isinstance(accusative, NounPhrase) and accusative.determiner in ("a", "many"):
            accusative = replace(accusative, determiner="no")
    if verb.datives:
        dative = _phrase(draw, verb.datives, nested, subject, "I we he she they")
    if draw.random() < 0.25:
        de, case, en, kinds = draw.choice(PREPOSITIONS)
        place = de, case, en, _noun_phrase(draw, kinds.split(), True, ["I", "we"])
    time = draw.choice(TIMES[tense]) if draw.random() < 0.3 else None
    predicate = draw.choice(ADJECTIVES[kind]) if verb is BE else None
    return Clause(subject, verb, tense, accusative, dative, time, place, predicate, modal, negated)


def _phrase(
    draw: Random,
    kinds: Sequence[str],
    nested: bool = False,
    subject: Phrase | None = None,
    pronouns: str = "I we he she they",
) -> Phrase:
    """A pronoun or a noun of these kinds; an object, where ``subject`` is given, which may own it."""
    owners = [pronoun_of(subject)] if subject else ["I", "we"]
    keys = [key for key in pronouns.split() if not subject or key not in owners]
    if "person" in kinds and draw.random() < 0.22:
        return Pronoun(draw.choice(keys))
    return _noun_phrase(draw, kinds, nested, owners)


def _noun_phrase(draw: Random, kinds: Sequence[str], nested: bool, owners: list[str]) -> NounPhrase:
    kind, plural = draw.choice(kinds), draw.random() < 0.3
    noun = draw.choice([noun for noun in NOUNS if noun.kind == kind])
    determiner = draw.choice(("the", "the", "the", "this", *["many" if plural else "a"] * 2, *owners))
    adjective = draw.choice(ADJECTIVES[kind]) if draw.random() < 0.3 else None
    modifier = draw.choice(MODIFIERS) if kind not in ("person", "animal") and draw.random() < 0.35 else ("", "")
    phrase = NounPhrase(noun, plural, determiner, adjective, modifier)
    if not nested and determiner == "the" and draw.random() < 0.15:
        return replace(phrase, owner=replace(_noun_phrase(draw, ["person"], True, []), determiner="the"))
    if not nested and draw.random() < 0.1:
        return replace(phrase, relative=_relative(draw, Gap(noun, plural)))
    return phrase
