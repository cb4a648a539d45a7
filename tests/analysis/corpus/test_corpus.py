"""The generated corpus against German and English written out by hand."""

import hashlib
from dataclasses import replace
from itertools import islice

import pytest

from analysis.corpus.__main__ import main
from analysis.corpus.generate import pairs
from analysis.corpus.grammar import (
    CASES,
    Clause,
    Gap,
    NounPhrase,
    Pronoun,
    as_text,
    english,
    german_final,
    german_main,
    german_phrase,
)
from analysis.corpus.lexicon import ADJECTIVES, BE, NOUNS, VERBS

NOUN = {noun.de: noun for noun in NOUNS}
VERB = {verb.prefix + verb.de: verb for verb in VERBS}
ADJECTIVE = {adjective.de: adjective for adjectives in ADJECTIVES.values() for adjective in adjectives}

DECLENSION = {
    ("the", "Mann", False): "der alte Mann, den alten Mann, dem alten Mann, des alten Mannes",
    ("the", "Frau", False): "die alte Frau, die alte Frau, der alten Frau, der alten Frau",
    ("the", "Pferd", False): "das alte Pferd, das alte Pferd, dem alten Pferd, des alten Pferdes",
    ("the", "Nachbar", False): "der alte Nachbar, den alten Nachbarn, dem alten Nachbarn, des alten Nachbarn",
    ("the", "Mann", True): "die alten Männer, die alten Männer, den alten Männern, der alten Männer",
    ("this", "Mann", False): "dieser alte Mann, diesen alten Mann, diesem alten Mann, dieses alten Mannes",
    ("this", "Hotel", True): "diese alten Hotels, diese alten Hotels, diesen alten Hotels, dieser alten Hotels",
    ("a", "Mann", False): "ein alter Mann, einen alten Mann, einem alten Mann, eines alten Mannes",
    ("a", "Frau", False): "eine alte Frau, eine alte Frau, einer alten Frau, einer alten Frau",
    ("a", "Pferd", False): "ein altes Pferd, ein altes Pferd, einem alten Pferd, eines alten Pferdes",
    ("many", "Kind", True): "viele alte Kinder, viele alte Kinder, vielen alten Kindern, vieler alter Kinder",
    ("no", "Frau", True): "keine alten Frauen, keine alten Frauen, keinen alten Frauen, keiner alten Frauen",
    ("we", "Kind", False): "unser altes Kind, unser altes Kind, unserem alten Kind, unseres alten Kindes",
}


@pytest.mark.parametrize("key", DECLENSION, ids=str)
def test_determiner_adjective_and_noun_agree_in_every_case(key):
    determiner, noun, plural = key
    phrase = NounPhrase(NOUN[noun], plural, determiner, ADJECTIVE["alt"])
    assert ", ".join(german_phrase(phrase, case) for case in CASES) == DECLENSION[key]


MAN, WOMAN, CHILD = (NounPhrase(NOUN[noun]) for noun in ("Mann", "Frau", "Kind"))
READS = Clause(WOMAN, VERB["lesen"], accusative=NounPhrase(NOUN["Brief"]))
GETS_UP = Clause(MAN, VERB["aufstehen"], time=("am Morgen", "in the morning"))
TODAY = ("heute", "today")
WHOM_SHE_SEES = Clause(WOMAN, VERB["sehen"], accusative=Gap(NOUN["Mann"], False))
GOT_UP = replace(GETS_UP, tense="past", negated=True)
NO_APPLE = replace(READS, negated=True, accusative=NounPhrase(NOUN["Apfel"], determiner="no"), tense="past")
PICKED_UP = Clause(Pronoun("they"), VERB["abholen"], accusative=Pronoun("he"), time=TODAY, tense="past")
BALL = NounPhrase(NOUN["Ball"], owner=NounPhrase(NOUN["Nachbar"]))
WAS_TIRED = Clause(replace(MAN, relative=WHOM_SHE_SEES), BE, predicate=ADJECTIVE["müde"], tense="past")
ICE_HOUSE = ("in", "dative", "in", NounPhrase(NOUN["Haus"], modifier=("Eis", "ice")))
#: a clause, what comes first in it, and the sentences
MAIN = [
    (READS, "accusative", "Den Brief liest die Frau. = The woman reads the letter."),
    (replace(READS, time=TODAY), "time", "Heute liest die Frau den Brief. = Today the woman reads the letter."),
    (GETS_UP, "subject", "Der Mann steht am Morgen auf. = The man gets up in the morning."),
    (GOT_UP, "subject", "Der Mann ist am Morgen nicht aufgestanden. = The man did not get up in the morning."),
    (NO_APPLE, "subject", "Die Frau hat keinen Apfel gelesen. = The woman did not read an apple."),
    (
        *(replace(READS, modal="müssen"), "subject"),
        "Die Frau muss den Brief lesen. = The woman has to read the letter.",
    ),
    (
        *(replace(READS, modal="können", negated=True), "subject"),
        "Die Frau kann den Brief nicht lesen. = The woman cannot read the letter.",
    ),
    (PICKED_UP, "subject", "Sie haben ihn heute abgeholt. = They picked him up today."),
    (
        *(Clause(MAN, VERB["geben"], accusative=BALL, dative=CHILD), "subject"),
        "Der Mann gibt dem Kind den Ball des Nachbarn. = The man gives the child the neighbour's ball.",
    ),
    (WAS_TIRED, "subject", "Der Mann, den die Frau sieht, war müde. = The man that the woman sees was tired."),
    (
        *(Clause(Pronoun("I"), VERB["arbeiten"], place=ICE_HOUSE), "subject"),
        "Ich arbeite im Eishaus. = I work in the ice house.",
    ),
]


@pytest.mark.parametrize(("clause", "front", "sentences"), MAIN)
def test_main_clauses(clause, front, sentences):
    assert f"{as_text(german_main(clause, front))} = {as_text(english(clause, front))}" == sentences


def test_the_verb_comes_last_in_a_subordinate_clause_and_first_in_a_question():
    assert german_final(GETS_UP) == "der Mann am Morgen aufsteht"
    assert german_final(replace(READS, modal="wollen")) == "die Frau den Brief lesen will"
    assert as_text(german_main(READS, ""), "?") == "Liest die Frau den Brief?"
    assert as_text(english(READS, inverted=True), "?") == "Does the woman read the letter?"


def test_a_seed_gives_the_same_sentences_everywhere_and_none_twice():
    drawn = list(islice(pairs(1), 2000))
    assert len(set(drawn)) == 2000
    text = "\n".join(f"{de}\t{en}" for de, en in drawn)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "54262d169e7c701c"
    assert not any(wrong in text for wrong in ("  ", " ,", " .", "in dem ", " a a", "haves", "\n "))
    assert drawn[0] != next(pairs(2))


def test_the_command_writes_parallel_text(tmp_path):
    assert main([str(tmp_path / "a"), "--sentences", "30", "--held-out", "5"]) == 0
    lines = {path.name: len(path.read_text().splitlines()) for path in (tmp_path / "a").iterdir()}
    assert lines == {f"{s}.{la}": n for s, n in (("train", 30), ("valid", 5), ("test", 5)) for la in ("de", "en")}
