"""A clause as data, and its words in German (genders, cases, verb placement) and in English."""

from __future__ import annotations

import re
from dataclasses import dataclass

from analysis.corpus.lexicon import Adjective, Noun, Verb, with_s

CASES = ("nominative", "accusative", "dative", "genitive")


def _by_case(*rows: str) -> dict[str, list[str]]:
    """Endings (or words) by case; in each for m, f, n and plural, "-" for none."""
    return {case: [form.strip("-") for form in row.split()] for case, row in zip(CASES, rows, strict=True)}


DEFINITE = _by_case("der die das die", "den die das die", "dem der dem den", "des der des der")
THIS = _by_case("er e es e", "en e es e", "em er em en", "es er es er")
EIN = _by_case("- e - e", "en e - e", "em er em en", "es er es er")
#: of adjectives: after der and dieser, after ein and the like, after viele
WEAK = _by_case("e e e en", "en e e en", "en en en en", "en en en en")
MIXED = _by_case("er e es en", "en e es en", "en en en en", "en en en en")
MANY = _by_case("- - - e", "- - - e", "- - - en", "- - - er")
#: determiner -> German stem, its endings, those of an adjective after it; English singular and plural
DETERMINERS = {
    "the": ("", DEFINITE, WEAK, "the the"),
    "this": ("dies", THIS, WEAK, "this these"),
    "a": ("ein", EIN, MIXED, "a a"),
    "many": ("viel", THIS, MANY, "many many"),
    "no": ("kein", EIN, MIXED, "a any"),  # the English verb is negated
}
#: English -> nominative, accusative, dative; English object; German and English possessive. it: by German gender
PRONOUNS = {
    "I": ("ich mich mir", "me", "mein", "my"),
    "we": ("wir uns uns", "us", "unser", "our"),
    "he": ("er ihn ihm", "him", "sein", "his"),
    "she": ("sie sie ihr", "her", "ihr", "her"),
    "it m": ("er ihn ihm", "it", "sein", "its"),
    "it f": ("sie sie ihr", "it", "ihr", "its"),
    "it n": ("es es ihm", "it", "sein", "its"),
    "they": ("sie sie ihnen", "them", "ihr", "their"),
}
DETERMINERS |= {key: (de, EIN, MIXED, f"{en} {en}") for key, (_, _, de, en) in PRONOUNS.items()}
#: finite forms for ich, er and wir
FINITE = {
    "haben": "habe hat haben",
    "sein": "bin ist sind",
    "war": "war war waren",
    "werden": "werde wird werden",
    "können": "kann kann können",
    "sollen": "soll soll sollen",
    "dürfen": "darf darf dürfen",
    "wollen": "will will wollen",
    "müssen": "muss muss müssen",
}
#: modal -> English auxiliary, or "verb to" where English takes do
MODALS = {"können": "can", "sollen": "should", "dürfen": "may", "wollen": "want to", "müssen": "have to"}


@dataclass(frozen=True)
class NounPhrase:
    noun: Noun
    plural: bool = False
    determiner: str = "the"  #: of DETERMINERS; a pronoun stands for its possessive
    adjective: Adjective | None = None
    modifier: tuple[str, str] = ("", "")  #: first part of a compound in both languages
    owner: NounPhrase | None = None
    relative: Clause | None = None  #: its gap holds this noun


@dataclass(frozen=True)
class Pronoun:
    key: str  #: of PRONOUNS


@dataclass(frozen=True)
class Gap:
    """The place of a relative pronoun in its clause: the subject or the accusative."""

    noun: Noun
    plural: bool


Phrase = NounPhrase | Pronoun | Gap


@dataclass(frozen=True)
class Clause:
    subject: Phrase
    verb: Verb
    tense: str = "present"  #: present, past or future
    accusative: Phrase | None = None
    dative: Phrase | None = None
    time: tuple[str, str] | None = None
    place: tuple[str, str, str, NounPhrase] | None = None  #: German preposition, case, English preposition
    predicate: Adjective | None = None
    modal: str = ""
    negated: bool = False


def pronoun_of(phrase: Phrase) -> str:
    """The key of PRONOUNS that stands for it."""
    if isinstance(phrase, Pronoun):
        return phrase.key
    if phrase.plural:
        return "they"
    gender = phrase.noun.gender
    if phrase.noun.kind != "person" or gender == "n":
        return f"it {gender}"
    return {"m": "he", "f": "she"}[gender]


# ---- German -------------------------------------------------------------------------------------------------------


def german_phrase(phrase: Phrase, case: str) -> str:
    if isinstance(phrase, Pronoun):
        return PRONOUNS[phrase.key][0].split()[CASES.index(case)]
    column = 3 if phrase.plural else "mfn".index(phrase.noun.gender)
    if isinstance(phrase, Gap):
        return DEFINITE[case][column]
    stem, endings, adjective_endings, _ = DETERMINERS[phrase.determiner]
    words = [stem + endings[case][column]]
    if phrase.adjective:
        words.append(phrase.adjective.stem + adjective_endings[case][column])
    words.append(_german_noun(phrase, case))
    if phrase.owner:
        words.append(german_phrase(phrase.owner, "genitive"))
    if phrase.relative:
        words.append(f", {german_final(phrase.relative)} ,")
    return " ".join(words)


def _german_noun(phrase: NounPhrase, case: str) -> str:
    noun, modifier = phrase.noun, phrase.modifier[0]
    if phrase.plural:
        form = noun.plural + ("n" if case == "dative" and noun.plural[-1] not in "ns" else "")
    elif case == "genitive" or (case != "nominative" and noun.gender == "m" and noun.genitive[-1] == "n"):
        form = noun.genitive
    else:
        form = noun.de
    return modifier + form.lower() if modifier else form


def _person(subject: Phrase) -> int:
    """0 for ich, 1 for the third person singular, 2 for the plural."""
    return {"I": 0, "we": 2, "they": 2}.get(pronoun_of(subject), 1)


def _german_verb(clause: Clause) -> tuple[str, str, str]:
    """(prefix that parts from the finite verb, finite verb, what ends the clause)."""
    verb, person = clause.verb, _person(clause.subject)
    infinitive = verb.prefix + verb.de
    if clause.tense == "past":
        auxiliary = "war" if verb.de == "sein" else "sein" if verb.sein else "haben"
        return "", FINITE[auxiliary].split()[person], verb.participle
    if clause.modal or clause.tense == "future":
        return "", FINITE[clause.modal or "werden"].split()[person], infinitive
    forms = FINITE[verb.de].split() if verb.de in FINITE else (verb.de[:-2] + "e", verb.er, verb.de)
    return verb.prefix, forms[person], ""


def _german_parts(clause: Clause) -> dict[str, str]:
    """The constituents, in the order of the middle field."""
    objects = {"accusative": clause.accusative, "dative": clause.dative}
    said = {case: german_phrase(phrase, case) for case, phrase in objects.items() if phrase}
    parts = {"subject": german_phrase(clause.subject, "nominative")}
    parts |= {case: said[case] for case, phrase in objects.items() if isinstance(phrase, Pronoun)}
    parts |= {"time": clause.time[0]} if clause.time else {}
    parts |= {case: said[case] for case in ("dative", "accusative") if case in said and case not in parts}
    if clause.negated and not (isinstance(clause.accusative, NounPhrase) and clause.accusative.determiner == "no"):
        parts["negation"] = "nicht"
    if clause.place:
        parts["place"] = f"{clause.place[0]} {german_phrase(clause.place[3], clause.place[1])}"
    return parts | ({"predicate": clause.predicate.de} if clause.predicate else {})


def german_main(clause: Clause, front: str = "subject") -> str:
    """Verb second, after the constituent ``front``; "" puts the verb first (questions, after a subordinate clause)."""
    parts = _german_parts(clause)
    prefix, finite, end = _german_verb(clause)
    first = parts.pop(front) if front else ""
    return " ".join(filter(None, (first, finite, *parts.values(), prefix, end)))


def german_final(clause: Clause) -> str:
    """Verb last; a relative pronoun first."""
    parts = _german_parts(clause)
    roles = {"subject": clause.subject, "accusative": clause.accusative}
    first = [parts.pop(role) for role, phrase in roles.items() if isinstance(phrase, Gap)]
    prefix, finite, end = _german_verb(clause)
    return " ".join(filter(None, (*first, *parts.values(), end, prefix + finite)))


# ---- English ------------------------------------------------------------------------------------------------------


def english_phrase(phrase: Phrase, subject: bool = False) -> str:
    if isinstance(phrase, Gap):
        return ""  # "that" opens the relative clause
    if isinstance(phrase, Pronoun):
        return phrase.key.split()[0] if subject else PRONOUNS[phrase.key][1]
    noun = phrase.noun.en_plural if phrase.plural else phrase.noun.en
    determiner = DETERMINERS[phrase.determiner][3].split()[phrase.plural]
    if phrase.owner:
        owner = english_phrase(phrase.owner)
        determiner = owner + ("'" if owner.endswith("s") and phrase.owner.plural else "'s")
    words = [determiner, phrase.adjective.en if phrase.adjective else "", phrase.modifier[1], noun]
    relative = ["that", english(phrase.relative)] if phrase.relative else []
    return " ".join(filter(None, (*words, *relative)))


def _english_verb(clause: Clause, inverted: bool) -> tuple[str, str]:
    """(auxiliary or "", main verb)."""
    key, base = pronoun_of(clause.subject), clause.verb.en
    singular = key not in ("I", "we", "they")
    modal = MODALS.get(clause.modal, "will" if clause.tense == "future" else "")
    rest = ""
    if modal.endswith(" to"):
        rest, base = f" to {base}", modal.split()[0]
    elif modal:
        return modal, base
    if base == "be":
        past = "was" if singular or key == "I" else "were"
        return (past if clause.tense == "past" else "am" if key == "I" else "is" if singular else "are"), ""
    if clause.negated or inverted:
        return ("did" if clause.tense == "past" else "does" if singular else "do"), base + rest
    form = clause.verb.past if clause.tense == "past" else _third_person(base) if singular else base
    return "", form + rest


def _third_person(base: str) -> str:
    return "has" if base == "have" else with_s(base)


def english(clause: Clause, front: str = "", inverted: bool = False) -> str:
    """``front``: "time" or "place" opens the clause, as in German; ``inverted``: the order of questions."""
    auxiliary, main = _english_verb(clause, inverted)
    subject, negation = english_phrase(clause.subject, subject=True), "not" if clause.negated else ""
    start = (auxiliary, subject, negation) if inverted else (subject, auxiliary, negation)
    objects = [english_phrase(phrase) for phrase in (clause.dative, clause.accusative) if phrase]
    splits = clause.verb.splits and isinstance(clause.accusative, Pronoun)
    objects = [*objects, clause.verb.tail] if splits else [clause.verb.tail, *objects]
    time = clause.time[1] if clause.time else ""
    place = f"{clause.place[2]} {english_phrase(clause.place[3])}" if clause.place else ""
    predicate = clause.predicate.en if clause.predicate else ""
    first = {"time": time, "place": place}.get(front, "")
    last = [part for part in (place, time) if part != first]
    return " ".join(filter(None, (first, *start, main, *objects, predicate, *last))).replace("can not", "cannot")


def as_text(words: str, end: str = ".") -> str:
    """A sentence as it is printed: commas, contractions, a or an, capitals."""
    text = re.sub(r"[\s,]*,\s*", ", ", words).strip(", ")
    text = re.sub(r"\b([Ii])n dem\b", r"\1m", text)
    text = re.sub(r"\ba (?=[aeiou])", "an ", text)
    return text[0].upper() + text[1:] + end
