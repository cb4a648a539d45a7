"""The generated corpus against German and English as a grammar book states them, written out by hand here."""

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest

from analysis.corpus import english, german, particles
from analysis.corpus.__main__ import main
from analysis.corpus.generate import as_text, pairs
from analysis.corpus.nouns import ADJECTIVES, NOUNS
from analysis.corpus.particles import MANY, THE, THIS, A
from analysis.corpus.syntax import Clause, Complement, Gap, NounPhrase, PrepPhrase, Pronoun, Sentence, Subordinate
from analysis.corpus.verbs import VERBS
from analysis.corpus.words import Preposition

ROOT = Path(__file__).parents[2]
NOUN = {noun.de: noun for noun in NOUNS}
ADJECTIVE = {adjective.de: adjective for adjective in ADJECTIVES}
YOUR = particles.POSSESSIVES[2, True]
CASES = ("nominative", "accusative", "dative", "genitive")


def verb(infinitive, frame=None):
    return next(v for f, verbs in VERBS.items() for v in verbs if v.prefix + v.de == infinitive and frame in (None, f))


def np(noun, determiner=THE, plural=False, adjective=None, **more):
    return NounPhrase(NOUN[noun], plural, determiner, ADJECTIVE[adjective] if adjective else None, **more)


def both(sentence):
    return as_text(german.words(sentence)), as_text(english.words(sentence))


# ---- noun phrases -------------------------------------------------------------------------------------------------

DECLENSION = {
    (THE, "Mann", False): "der alte Mann, den alten Mann, dem alten Mann, des alten Mannes",
    (THE, "Frau", False): "die alte Frau, die alte Frau, der alten Frau, der alten Frau",
    (THE, "Pferd", False): "das alte Pferd, das alte Pferd, dem alten Pferd, des alten Pferdes",
    (THE, "Nachbar", False): "der alte Nachbar, den alten Nachbarn, dem alten Nachbarn, des alten Nachbarn",
    (THE, "Mann", True): "die alten Männer, die alten Männer, den alten Männern, der alten Männer",
    (THE, "Auto", True): "die alten Autos, die alten Autos, den alten Autos, der alten Autos",
    (THIS, "Mann", False): "dieser alte Mann, diesen alten Mann, diesem alten Mann, dieses alten Mannes",
    (THIS, "Frau", False): "diese alte Frau, diese alte Frau, dieser alten Frau, dieser alten Frau",
    (THIS, "Pferd", False): "dieses alte Pferd, dieses alte Pferd, diesem alten Pferd, dieses alten Pferdes",
    (A, "Mann", False): "ein alter Mann, einen alten Mann, einem alten Mann, eines alten Mannes",
    (A, "Frau", False): "eine alte Frau, eine alte Frau, einer alten Frau, einer alten Frau",
    (A, "Pferd", False): "ein altes Pferd, ein altes Pferd, einem alten Pferd, eines alten Pferdes",
    (YOUR, "Frau", True): "eure alten Frauen, eure alten Frauen, euren alten Frauen, eurer alten Frauen",
    (particles.NO, "Frau", True): "keine alten Frauen, keine alten Frauen, keinen alten Frauen, keiner alten Frauen",
    (MANY, "Kind", True): "viele alte Kinder, viele alte Kinder, vielen alten Kindern, vieler alter Kinder",
    (particles.BARE, "Pferd", True): "alte Pferde, alte Pferde, alten Pferden, alter Pferde",
    (particles.BARE, "Wasser", False): "kaltes Wasser, kaltes Wasser, kaltem Wasser, kalten Wassers",
    (particles.TWO, "Hund", True): "zwei alte Hunde, zwei alte Hunde, zwei alten Hunden, zwei alter Hunde",
}  # fmt: skip


@pytest.mark.parametrize("key", DECLENSION, ids=lambda key: f"{key[0].de}-{key[1]}-{key[2]}")
def test_determiner_adjective_and_noun_agree_in_every_case(key):
    determiner, noun, plural = key
    phrase = np(noun, determiner, plural, "kalt" if noun == "Wasser" else "alt")
    forms = [" ".join(german.noun_phrase(phrase, case)) for case in CASES]
    assert ", ".join(forms) == DECLENSION[key]


ARTICLES = {
    # gender or plural: the definite and indefinite articles of nominative, accusative, dative, genitive
    "m": [{"der", "ein"}, {"den", "einen"}, {"dem", "einem"}, {"des", "eines"}],
    "f": [{"die", "eine"}, {"die", "eine"}, {"der", "einer"}, {"der", "einer"}],
    "n": [{"das", "ein"}, {"das", "ein"}, {"dem", "einem"}, {"des", "eines"}],
    "plural": [{"die"}, {"die"}, {"den"}, {"der"}],
}


def test_every_article_that_stands_before_a_noun_is_one_its_gender_and_number_allow():
    allowed: dict[str, set[str]] = {}
    for noun in NOUNS:
        for number in ("m", "plural") if noun.de_plural else ("m",):
            row = "plural" if number == "plural" else noun.gender
            for case, articles in zip(CASES, ARTICLES[row], strict=True):
                form = german.inflected_noun(noun, row == "plural", case)
                allowed.setdefault(form, set()).update(articles)
    every_article = {article for row in ARTICLES.values() for articles in row for article in articles}
    seen = 0
    for de, _ in islice(pairs(3), 3000):
        # a relative pronoun before a bare plural (", die Kinder sehen") only looks like an article
        for article, word in pairwise(re.findall(r"\w+", re.sub(r", (der|die|das|dem|den) ", ", - ", de))):
            if word in allowed and article.lower() in every_article:
                assert article.lower() in allowed[word], de
                seen += 1
    assert seen > 2000


# ---- clauses ------------------------------------------------------------------------------------------------------

MAN, WOMAN = np("Mann"), np("Frau")
SUBORDINATE = {conjunction.de: conjunction for conjunction in particles.CONJUNCTIONS}
TIME = {adverb.de: adverb for adverb in particles.TIMES}
MODAL = {modal.de: modal for modal in particles.MODALS}
READS = Clause(WOMAN, verb("lesen"), "present", accusative=np("Buch", A))
GETS_UP = Clause(MAN, verb("aufstehen"), "present", time=TIME["am Morgen"])

SEEN_BY_THE_WOMAN = Clause(WOMAN, verb("sehen"), "present", accusative=Gap(NOUN["Mann"], False))
LISTENED_TO = Clause(MAN, verb("zuhören"), "present", dative=Gap(NOUN["Kind"], True))

SENTENCES = {
    "verb second": (Sentence(READS), "Die Frau liest ein Buch.", "The woman reads a book."),
    "inversion": (
        Sentence(replace(READS, time=TIME["heute"]), front="time"),
        "Heute liest die Frau ein Buch.",
        "Today the woman reads a book.",
    ),
    "object first": (
        Sentence(replace(READS, accusative=np("Brief")), front="object"),
        "Den Brief liest die Frau.",
        "The woman reads the letter.",
    ),
    "kein": (
        Sentence(replace(READS, negated=True, accusative=np("Buch", particles.NO))),
        "Die Frau liest kein Buch.",
        "The woman does not read a book.",
    ),
    "nicht": (
        Sentence(replace(READS, negated=True, tense="past", accusative=np("Apfel"))),
        "Die Frau hat den Apfel nicht gelesen.",
        "The woman did not read the apple.",
    ),
    "an": (
        Sentence(replace(READS, accusative=np("Frage", A, adjective="einfach"))),
        "Die Frau liest eine einfache Frage.",
        "The woman reads an easy question.",
    ),
    "perfect": (
        Sentence(replace(READS, tense="past", time=TIME["gestern"])),
        "Die Frau hat gestern ein Buch gelesen.",
        "The woman read a book yesterday.",
    ),
    "future": (
        Sentence(replace(READS, tense="future")),
        "Die Frau wird ein Buch lesen.",
        "The woman will read a book.",
    ),
    "modal": (
        Sentence(replace(READS, modal=MODAL["müssen"], negated=True, accusative=np("Buch"))),
        "Die Frau muss das Buch nicht lesen.",
        "The woman does not have to read the book.",
    ),
    "modal in the past": (
        Sentence(replace(GETS_UP, modal=MODAL["dürfen"], tense="past", subject=np("Mann", plural=True))),
        "Die Männer durften am Morgen aufstehen.",
        "The men were allowed to get up in the morning.",
    ),
    "cannot": (
        Sentence(replace(GETS_UP, modal=MODAL["können"], negated=True)),
        "Der Mann kann am Morgen nicht aufstehen.",
        "The man cannot get up in the morning.",
    ),
    "prefix parts": (Sentence(GETS_UP), "Der Mann steht am Morgen auf.", "The man gets up in the morning."),
    "prefix in the perfect": (
        Sentence(replace(GETS_UP, tense="past")),
        "Der Mann ist am Morgen aufgestanden.",
        "The man got up in the morning.",
    ),
    "prefix joins verb-final": (
        Sentence(READS, subordinate=Subordinate(SUBORDINATE["weil"], GETS_UP, first=False)),
        "Die Frau liest ein Buch, weil der Mann am Morgen aufsteht.",
        "The woman reads a book because the man gets up in the morning.",
    ),
    "prefix around zu": (
        Sentence(Clause(MAN, verb("versuchen"), "present", complement=Complement("zu", replace(GETS_UP, time=None)))),
        "Der Mann versucht, aufzustehen.",
        "The man tries to get up.",
    ),
    "clause first": (
        Sentence(
            GETS_UP,
            front="none",
            subordinate=Subordinate(SUBORDINATE["nachdem"], replace(READS, tense="pluperfect"), first=True),
        ),
        "Nachdem die Frau ein Buch gelesen hatte, steht der Mann am Morgen auf.",
        "After the woman had read a book, the man gets up in the morning.",
    ),
    "dass": (
        Sentence(Clause(Pronoun(1, False, ""), verb("wissen"), "present", complement=Complement("dass", GETS_UP))),
        "Ich weiß, dass der Mann am Morgen aufsteht.",
        "I know that the man gets up in the morning.",
    ),
    "question": (
        Sentence(replace(READS, subject=Pronoun(2, True, "")), front="none", question="why"),
        "Warum lest ihr ein Buch?",
        "Why do you read a book?",
    ),
    "pronoun before the subject": (
        Sentence(
            Clause(MAN, verb("helfen"), "present", dative=Pronoun(3, False, "f"), time=TIME["heute"]), front="time"
        ),
        "Heute hilft ihr der Mann.",
        "Today the man helps her.",
    ),
    "English particle": (
        Sentence(Clause(MAN, verb("abholen"), "past", accusative=Pronoun(3, False, "m"))),
        "Der Mann hat ihn abgeholt.",
        "The man picked him up.",
    ),
    "reflexive": (
        Sentence(
            Clause(
                Pronoun(1, True, ""),
                verb("freuen"),
                "present",
                oblique=PrepPhrase(Preposition("auf", ""), "accusative", np("Reise")),
            )
        ),
        "Wir freuen uns auf die Reise.",
        "We look forward to the journey.",
    ),
    "dative and genitive": (
        Sentence(Clause(MAN, verb("geben"), "present", dative=np("Junge"), accusative=np("Ball", owner=np("Nachbar")))),
        "Der Mann gibt dem Jungen den Ball des Nachbarn.",
        "The man gives the boy the neighbour's ball.",
    ),
    "relative, accusative": (
        Sentence(replace(GETS_UP, subject=np("Mann", relative=SEEN_BY_THE_WOMAN))),
        "Der Mann, den die Frau sieht, steht am Morgen auf.",
        "The man whom the woman sees gets up in the morning.",
    ),
    "relative, dative plural": (
        Sentence(replace(READS, subject=np("Kind", plural=True, relative=LISTENED_TO))),
        "Die Kinder, denen der Mann zuhört, lesen ein Buch.",
        "The children whom the man listens to read a book.",
    ),
    "whereto and where": (
        Sentence(
            Clause(WOMAN, verb("gehen"), "past", place=PrepPhrase(Preposition("in", "to"), "accusative", np("Haus"))),
            second=(
                "aber",
                Clause(MAN, verb("bleiben"), "past", place=PrepPhrase(Preposition("in", "in"), "dative", np("Haus"))),
            ),
        ),
        "Die Frau ist ins Haus gegangen, aber der Mann ist im Haus geblieben.",
        "The woman went to the house, but the man stayed in the house.",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_a_tree_reads_as_a_grammar_book_has_it(name):
    tree, de, en = SENTENCES[name]
    assert both(tree) == (de, en)


def test_subordinate_clauses_end_in_a_finite_verb():
    persons = [(1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
    finite = {form for forms in german.IRREGULAR.values() for tense in forms.values() for form in tense.values()}
    finite |= {v.prefix + german.present(v, *person) for verbs in VERBS.values() for v in verbs for person in persons}
    clause = re.compile(r"(?:, dass|, ob|, weil|, obwohl|^Weil|^Obwohl|^Wenn|^Nachdem) ([^,.?]+)(?:, [^z]|\.)")
    found = [match[1] for de, _ in islice(pairs(5), 3000) for match in clause.finditer(de)]
    # a clause that goes on with "..., um zu" or a relative clause has a comma inside: those end in a verb as well
    assert len(found) > 300
    assert [text for text in found if text.split()[-1] not in finite] == []


def test_separable_verbs_part_and_join_in_the_corpus():
    text = "\n".join(de for de, _ in islice(pairs(7), 6000))
    assert re.search(r"\b(steht|stehen|stehst|stehe) (\w+ )*auf\.", text)
    assert re.search(r"\b(aufsteht|aufstehen|aufstehst|aufstehe)\b", text)
    assert "aufgestanden" in text
    assert re.search(r"\b(auf|ein|an|weg|mit|aus)zu\w+en\b", text)


# ---- the corpus ---------------------------------------------------------------------------------------------------


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_same_seed_gives_the_same_bytes_in_processes_with_other_hash_seeds(tmp_path):
    digests = []
    for hash_seed, seed in (("0", "4"), ("77", "4"), ("0", "5")):
        out = tmp_path / f"{hash_seed}-{seed}"
        command = [
            sys.executable,
            "-m",
            "analysis.corpus",
            str(out),
            "--sentences",
            "300",
            "--held-out",
            "20",
            "--seed",
            seed,
        ]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True)
        digests.append(digest(out))
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_splits_share_no_sentence_and_keep_their_size(tmp_path):
    assert main([str(tmp_path / "c"), "--sentences", "2000", "--held-out", "200", "--seed", "1"]) == 0
    for side in ("de", "en"):
        lines = {s: (tmp_path / "c" / f"{s}.{side}").read_text().splitlines() for s in ("train", "valid", "test")}
        assert [len(lines[s]) for s in lines] == [2000, 200, 200]
        together = [line for part in lines.values() for line in part]
        assert len(set(together)) == len(together)


def test_a_larger_training_part_leaves_the_held_out_parts_alone(tmp_path):
    for name, size in (("small", "50"), ("large", "100")):
        assert main([str(tmp_path / name), "--sentences", size, "--held-out", "30"]) == 0
    small, large = digest(tmp_path / "small"), digest(tmp_path / "large")
    assert {n for n in small if small[n] == large[n]} == {"test.de", "test.en", "valid.de", "valid.en"}


def test_the_lexicon_holds_a_few_hundred_words_and_the_corpus_uses_nearly_all():
    lexicon = (
        {noun.de for noun in NOUNS}
        | {a.de for a in ADJECTIVES}
        | {v.prefix + v.de for vs in VERBS.values() for v in vs}
    )
    assert 300 <= len(lexicon) <= 600
    words = set(re.findall(r"\w+", " ".join(de for de, _ in islice(pairs(1), 5000))))
    assert all(
        {german.inflected_noun(n, p, c) for p in {False, bool(n.de_plural)} for c in CASES} & words for n in NOUNS
    )
    assert 1200 <= len(words) <= 3000


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--sentences", "0"], "--sentences 0"),
        (["--held-out", "-1"], "--held-out -1"),
        (["--seed", "-1"], "--seed -1"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, named, tmp_path, capsys):
    assert main([str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over(tmp_path, capsys):
    (tmp_path / "valid.en").write_text("mine\n")
    assert main([str(tmp_path), "--sentences", "5", "--held-out", "5"]) == 2
    assert "valid.en is there already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["valid.en"]
    assert main([str(tmp_path / "valid.en")]) == 2
    assert "not a directory" in capsys.readouterr().err
