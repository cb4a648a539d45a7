"""Draws sentence pairs by a seed, and writes them as train, valid and test text."""

from collections.abc import Iterator
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
from analysis.corpus.lexicon import ADJECTIVES, BE, MODIFIERS, NOUNS, PREPOSITIONS, TIMES, VERBS, entries
from dsq.command.files import write_text

BY_KIND = {kind: [noun for noun in NOUNS if noun.kind == kind] for kind in BE.subjects}
TIMES_OF = {tense: tuple(entries(table)) for tense, table in TIMES.items()}
SUBORDINATING = (
    ("weil", "because"),
    ("obwohl", "although"),
    ("wenn", "when"),
    ("bevor", "before"),
    ("während", "while"),
)
COORDINATING = (("und", "and"), ("aber", "but"))
SAYING = [verb for verb in VERBS if verb.de in ("sehen", "hören", "vergessen", "verstehen") and not verb.prefix]


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
    main = _clause(draw)
    form = draw.choices(
        ("one", "question", "and", "subordinate", "subordinate first", "dass"), (30, 12, 20, 18, 10, 10)
    )[0]
    if form == "question":
        why = draw.random() < 0.4
        words = (
            ("warum " if why else "") + german_main(main, ""),
            ("why " if why else "") + english(main, inverted=True),
        )
        return as_text(words[0], "?"), as_text(words[1], "?")
    if form in ("and", "subordinate", "subordinate first"):
        other = _clause(draw, main.subject if draw.random() < 0.6 else None)
    if form == "subordinate first":
        de, en = draw.choice(SUBORDINATING)
        # the first clause names whom the pronoun of the second stands for
        return as_text(f"{de} {german_final(main)} , {german_main(other, '')}"), as_text(
            f"{en} {english(main)} , {english(other)}"
        )
    front = draw.choice(_fronts(main))
    words = german_main(main, front), english(main, front)
    if form == "and":
        (de, en), front = draw.choice(COORDINATING), draw.choice(("subject", *(["time"] if other.time else [])))
        words = f"{words[0]} , {de} {german_main(other, front)}", f"{words[1]} , {en} {english(other, front)}"
    elif form == "subordinate":
        de, en = draw.choice(SUBORDINATING)
        words = f"{words[0]} , {de} {german_final(other)}", f"{words[1]} {en} {english(other)}"
    elif form == "dass":
        knows = Clause(_subject(draw, ("person",)), draw.choice(SAYING), negated=draw.random() < 0.2)
        words = f"{german_main(knows)} , dass {german_final(main)}", f"{english(knows)} that {english(main)}"
    return as_text(words[0]), as_text(words[1])


def _fronts(clause: Clause) -> list[str]:
    """What may come first: an object only where its form, or the subject's, shows which is which."""
    found = ["subject", "subject", *(["time"] * 2 if clause.time else []), *(["place"] if clause.place else [])]
    thing = clause.accusative
    if isinstance(thing, NounPhrase) and not thing.plural and thing.noun.gender == "m" and not thing.relative:
        found.append("accusative")
    return found


def _clause(draw: Random, about: Phrase | None = None) -> Clause:
    """A clause about anyone, or about whom the pronoun for ``about`` stands for."""
    if about is None:
        verb = draw.choice((*VERBS, *[BE] * 12))
        subject = _subject(draw, verb.subjects)
        return _filled(draw, Clause(subject, verb), _kind(subject))
    verb = draw.choice([verb for verb in (*VERBS, *[BE] * 12) if _kind(about) in verb.subjects])
    return _filled(draw, Clause(Pronoun(pronoun_of(about)), verb), _kind(about))


def _kind(phrase: Phrase) -> str:
    return "person" if isinstance(phrase, Pronoun) else phrase.noun.kind


def _filled(draw: Random, clause: Clause, kind: str, depth: int = 0) -> Clause:
    """The clause, whose subject is of ``kind``, with objects, adverbials, tense, negation and modal drawn."""
    verb, subject = clause.verb, clause.subject
    tense = draw.choice(("present", "present", "past", "past", "future"))
    modal = draw.choice(list(MODALS)) if tense == "present" and verb is not BE and draw.random() < 0.25 else ""
    negated = draw.random() < 0.2
    accusative, dative = clause.accusative, clause.dative
    if verb.objects and accusative is None:
        accusative = _object(draw, verb.objects, subject, depth, ["I", "we", "he"])
        if negated and isinstance(accusative, NounPhrase) and accusative.determiner == "a":
            accusative = replace(accusative, determiner="no")
    if verb.datives and dative is None:
        dative = _object(draw, verb.datives, subject, depth, ["I", "we", "he", "she", "they"])
    time = draw.choice(TIMES_OF[tense]) if draw.random() < 0.3 else None
    place = None
    if draw.random() < 0.25:
        de, case, en, kinds = draw.choice(PREPOSITIONS)
        place = de, case, en, _noun_phrase(draw, tuple(kinds.split()), None, depth + 1)
    predicate = draw.choice(ADJECTIVES[kind]) if verb is BE else None
    return Clause(subject, verb, tense, accusative, dative, time, place, predicate, modal, negated)


def _relative(draw: Random, gap: Gap) -> Clause:
    role = draw.choice(("subject", "accusative"))
    if role == "subject":
        verb = draw.choice([verb for verb in (*VERBS, *[BE] * 6) if gap.noun.kind in verb.subjects])
        return _filled(draw, Clause(gap, verb), gap.noun.kind, depth=1)
    verb = draw.choice([verb for verb in VERBS if gap.noun.kind in verb.objects])
    subject = _subject(draw, verb.subjects, depth=1)
    return _filled(draw, Clause(subject, verb, accusative=gap), _kind(subject), depth=1)


def _subject(draw: Random, kinds: tuple[str, ...], depth: int = 0) -> Phrase:
    if "person" in kinds and draw.random() < 0.25:
        return Pronoun(draw.choice(("I", "we", "he", "she", "they")))
    return _noun_phrase(draw, kinds, None, depth)


def _object(draw: Random, kinds: tuple[str, ...], subject: Phrase, depth: int, pronouns: list[str]) -> Phrase:
    if "person" in kinds and draw.random() < 0.2:
        key = draw.choice([key for key in pronouns if key != pronoun_of(subject)])
        return Pronoun(key)
    return _noun_phrase(draw, kinds, subject, depth)


def _noun_phrase(draw: Random, kinds: tuple[str, ...], subject: Phrase | None, depth: int) -> NounPhrase:
    noun, plural = draw.choice(BY_KIND[draw.choice(kinds)]), draw.random() < 0.3
    owners = [pronoun_of(subject)] if subject is not None else ["I", "we"]
    determiner = draw.choice(("the", "the", "the", "this", "a", "a", *owners))
    adjective = draw.choice(ADJECTIVES[noun.kind]) if draw.random() < 0.3 else None
    modifier = draw.choice(MODIFIERS) if noun.kind not in ("person", "animal") and draw.random() < 0.35 else ("", "")
    phrase = NounPhrase(noun, plural, determiner, adjective, modifier)
    if depth == 0 and determiner == "the" and draw.random() < 0.15:
        return replace(phrase, owner=_noun_phrase_of_owner(draw))
    if depth == 0 and draw.random() < 0.1:
        return replace(phrase, relative=_relative(draw, Gap(noun, plural)))
    return phrase


def _noun_phrase_of_owner(draw: Random) -> NounPhrase:
    return replace(_noun_phrase(draw, ("person",), None, depth=1), determiner="the")
