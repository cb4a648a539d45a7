"""German: inflection, agreement and word order (verb second, verb final, the brackets of separable verbs)."""

import re

from analysis.corpus.syntax import (
    Clause,
    Complement,
    Coordination,
    Front,
    Gap,
    NounPhrase,
    Phrase,
    PrepPhrase,
    Pronoun,
    Sentence,
    agreement,
    gap_role,
)
from analysis.corpus.words import Adverb, Case, Determiner, Noun, Verb

# rows: masculine, neuter, feminine, plural; columns: nominative, accusative, dative, genitive
_CASES: tuple[Case, ...] = ("nominative", "accusative", "dative", "genitive")


def _paradigm(m: str, n: str, f: str, plural: str) -> dict[tuple[str, Case], str]:
    rows = {"m": m, "n": n, "f": f, "plural": plural}
    return {
        (row, case): "" if ending == "-" else ending
        for row, text in rows.items()
        for case, ending in zip(_CASES, text.split(), strict=True)
    }


_DEFINITE = _paradigm("er en em es", "as as em es", "ie ie er er", "ie ie en er")
_DER_WORD = _paradigm("er en em es", "es es em es", "e e er er", "e e en er")
_EIN_WORD = _paradigm("- en em es", "- - em es", "e e er er", "e e en er")
_NOTHING = _paradigm(*["- - - -"] * 4)
_WEAK = _paradigm("e en en en", "e e en en", "e e en en", "en en en en")
_MIXED = _paradigm("er en en en", "es es en en", "e e en en", "en en en en")
_STRONG = _paradigm("er en em en", "es es em en", "e e er er", "e e en er")
_RELATIVE = _paradigm("der den dem dessen", "das das dem dessen", "die die der deren", "die die denen deren")

# pattern -> (endings of the determiner, endings of the adjective after it)
_PATTERNS = {
    "definite": (_DEFINITE, _WEAK),
    "der-word": (_DER_WORD, _WEAK),
    "ein-word": (_EIN_WORD, _MIXED),
    "quantifier": (_DER_WORD, _STRONG),
    "uninflected": (_NOTHING, _STRONG),
    "bare": (_NOTHING, _STRONG),
}

# (person, plural, gender) -> nominative, accusative, dative
_PRONOUNS = {
    (1, False, ""): ("ich", "mich", "mir"),
    (2, False, ""): ("du", "dich", "dir"),
    (3, False, "m"): ("er", "ihn", "ihm"),
    (3, False, "f"): ("sie", "sie", "ihr"),
    (1, True, ""): ("wir", "uns", "uns"),
    (2, True, ""): ("ihr", "euch", "euch"),
    (3, True, ""): ("sie", "sie", "ihnen"),
}
_REFLEXIVES = {(1, False): "mich", (2, False): "dich", (1, True): "uns", (2, True): "euch"}

_PERSONS = ((1, False), (2, False), (3, False), (1, True), (2, True), (3, True))


def _conjugation(present: str, preterite: str = "") -> dict[str, dict[tuple[int, bool], str]]:
    return {
        tense: dict(zip(_PERSONS, forms.split(), strict=True))
        for tense, forms in (("present", present), ("preterite", preterite))
        if forms
    }


IRREGULAR = {
    "sein": _conjugation("bin bist ist sind seid sind", "war warst war waren wart waren"),
    "haben": _conjugation("habe hast hat haben habt haben", "hatte hattest hatte hatten hattet hatten"),
    "werden": _conjugation("werde wirst wird werden werdet werden"),
    "können": _conjugation("kann kannst kann können könnt können", "konnte konntest konnte konnten konntet konnten"),
    "müssen": _conjugation("muss musst muss müssen müsst müssen", "musste musstest musste mussten musstet mussten"),
    "wollen": _conjugation("will willst will wollen wollt wollen", "wollte wolltest wollte wollten wolltet wollten"),
    "sollen": _conjugation("soll sollst soll sollen sollt sollen"),
    "dürfen": _conjugation("darf darfst darf dürfen dürft dürfen", "durfte durftest durfte durften durftet durften"),
    "mögen": _conjugation("möchte möchtest möchte möchten möchtet möchten"),
}

_CONTRACTIONS = {
    ("in", "dem"): "im",
    ("in", "das"): "ins",
    ("an", "dem"): "am",
    ("an", "das"): "ans",
    ("von", "dem"): "vom",
    ("zu", "dem"): "zum",
    ("zu", "der"): "zur",
}


def _links_with_e(stem: str) -> bool:
    """arbeit-e-t, öffn-e-t, zeichn-e-t, but lern-t, wohn-t."""
    return re.search(r"[td]$|(?:[^aeiouäöülrhmn]|ch)[mn]$", stem) is not None


def _stem(infinitive: str) -> str:
    return infinitive.removesuffix("n").removesuffix("e")


def regular_forms(infinitive: str) -> tuple[str, str]:
    """The du and er forms of a verb whose stem does not change."""
    stem = _stem(infinitive)
    if _links_with_e(stem):
        return stem + "est", stem + "et"
    return stem + ("t" if stem[-1] in "sßzx" else "st"), stem + "t"


def present(verb: Verb, person: int, plural: bool) -> str:
    """The finite form without the prefix: (auf)steht, liest, lest."""
    if verb.de in IRREGULAR:
        return IRREGULAR[verb.de]["present"][person, plural]
    stem = _stem(verb.de)
    match person, plural:
        case 1, False:
            return stem + "e" if verb.er.endswith("t") else verb.er  # ich weiß, er weiß
        case 2, False:
            return verb.du
        case 3, False:
            return verb.er
        case 2, True:
            return stem + ("et" if _links_with_e(stem) else "t")
        case _:
            return verb.de


def _row(noun: Noun, plural: bool) -> str:
    return "plural" if plural else noun.gender


def inflected_noun(noun: Noun, plural: bool, case: Case) -> str:
    if plural:
        return noun.de_plural + ("n" if case == "dative" and noun.de_plural[-1] not in "ns" else "")
    if case == "genitive" or (noun.genitive.endswith("n") and case != "nominative" and noun.gender == "m"):
        return noun.genitive
    return noun.de


def inflected_determiner(determiner: Determiner, row: str, case: Case) -> str:
    ending = _PATTERNS[determiner.pattern][0][row, case]
    stem = "eur" if determiner.de == "euer" and ending else determiner.de
    return stem + ending


def noun_phrase(phrase: NounPhrase, case: Case) -> list[str]:
    row = _row(phrase.noun, phrase.plural)
    words = [inflected_determiner(phrase.determiner, row, case)]
    if phrase.adjective:
        words.append(phrase.adjective.stem + _PATTERNS[phrase.determiner.pattern][1][row, case])
    words.append(inflected_noun(phrase.noun, phrase.plural, case))
    if phrase.owner:
        words += noun_phrase(phrase.owner, "genitive")
    if phrase.relative:
        words += [",", *verb_final(phrase.relative), ","]
    return [word for word in words if word]


def _phrase(phrase: Phrase, case: Case) -> list[str]:
    match phrase:
        case Pronoun(person, plural, gender):
            return [_PRONOUNS[person, plural, gender][_CASES.index(case)]]
        case Gap(noun, plural):
            return [_RELATIVE[_row(noun, plural), case]]
        case Coordination(first, second):
            return [*noun_phrase(first, case), "und", *noun_phrase(second, case)]
        case NounPhrase():
            return noun_phrase(phrase, case)


def _prep_phrase(phrase: PrepPhrase) -> list[str]:
    words = _phrase(phrase.phrase, phrase.case)
    both = _CONTRACTIONS.get((phrase.preposition.de, words[0]))
    article = isinstance(phrase.phrase, NounPhrase) and phrase.phrase.determiner.pattern == "definite"
    return [both, *words[1:]] if both and article else [phrase.preposition.de, *words]


def _adverbial(item: Adverb | PrepPhrase) -> list[str]:
    return [item.de] if isinstance(item, Adverb) else _prep_phrase(item)


def _constituents(clause: Clause, after_verb: bool = False) -> dict[str, list[str]]:
    """Everything but the verb, in the order of the middle field.

    Pronouns come before the adverbs; right after the finite verb also before the subject, unless it is a pronoun
    itself: "heute hilft ihm der Mann".
    """
    objects = {"dative": clause.dative, "accusative": clause.accusative}
    spoken = {name: _phrase(phrase, name) for name, phrase in objects.items() if phrase}  # type: ignore[arg-type]
    early = {name for name, phrase in objects.items() if isinstance(phrase, Pronoun)}
    kein = isinstance(clause.accusative, NounPhrase) and clause.accusative.determiner.de == "kein"
    subject = {"subject": _phrase(clause.subject, "nominative")}
    weak = {name: words for name, words in spoken.items() if name in early}
    if clause.verb.reflexive:
        weak["reflexive"] = [_REFLEXIVES.get(agreement(clause.subject), "sich")]
    parts = weak | subject if after_verb and not isinstance(clause.subject, Pronoun) else subject | weak
    if clause.time:
        parts["time"] = _adverbial(clause.time)
    if clause.frequency:
        parts["frequency"] = [clause.frequency.de]
    parts |= {name: words for name, words in spoken.items() if name not in early}
    if clause.negated and not kein:
        parts["negation"] = ["nicht"]
    if clause.manner:
        parts["manner"] = [clause.manner.de]
    if clause.oblique:
        parts["oblique"] = _prep_phrase(clause.oblique)
    if clause.place:
        parts["place"] = _prep_phrase(clause.place)
    if clause.predicate:
        degree, adjective = clause.predicate
        parts["predicate"] = [degree.de, adjective.de] if degree else [adjective.de]
    return parts


def _verbs(clause: Clause) -> tuple[str, list[str]]:
    """(finite verb, what follows it at the end of the clause)."""
    verb, subject = clause.verb, agreement(clause.subject)
    infinitive = verb.prefix + verb.de
    if clause.modal:
        tense = "preterite" if clause.tense == "past" else "present"
        return IRREGULAR[clause.modal.de][tense][subject], [infinitive]
    if clause.tense == "future":
        return IRREGULAR["werden"]["present"][subject], [infinitive]
    if clause.tense == "pluperfect":
        return IRREGULAR[verb.auxiliary]["preterite"][subject], [verb.participle]
    if clause.tense == "past" and verb.de == "sein":
        return IRREGULAR["sein"]["preterite"][subject], []
    if clause.tense == "past":
        return IRREGULAR[verb.auxiliary]["present"][subject], [verb.participle]
    return present(verb, *subject), []


def _particle(clause: Clause) -> str:
    """The prefix that parts from a finite verb in a main clause."""
    return clause.verb.prefix if clause.tense == "present" and not clause.modal else ""


def _complement(complement: Complement | None) -> list[str]:
    if complement is None:
        return []
    if complement.kind in ("dass", "ob"):
        return [",", complement.kind, *verb_final(complement.clause)]
    return [",", *(["um"] if complement.kind == "um" else []), *infinitive_clause(complement.clause)]


def _flat(parts: dict[str, list[str]]) -> list[str]:
    return [word for words in parts.values() for word in words]


def main_clause(clause: Clause, front: Front) -> list[str]:
    """Verb second: front, finite verb, middle field, participle or infinitive or separated prefix."""
    parts = _constituents(clause, after_verb=front != "subject")
    if front == "object":
        front_words = parts.pop("accusative" if "accusative" in parts else "dative")
    else:
        front_words = [] if front == "none" else parts.pop(front)
    finite, end = _verbs(clause)
    particle = _particle(clause)
    tail = [*end, *([particle] if particle else [])]
    return [*front_words, finite, *_flat(parts), *tail, *_complement(clause.complement)]


def verb_final(clause: Clause) -> list[str]:
    """Middle field, participle or infinitive, finite verb joined to its prefix; a relative pronoun comes first."""
    parts = _constituents(clause)
    role = gap_role(clause)
    first = parts.pop(role) if role else []
    finite, end = _verbs(clause)
    return [*first, *_flat(parts), *end, _particle(clause) + finite, *_complement(clause.complement)]


def infinitive_clause(clause: Clause) -> list[str]:
    parts = _constituents(clause)
    del parts["subject"]
    verb = clause.verb
    return [*_flat(parts), *([f"{verb.prefix}zu{verb.de}"] if verb.prefix else ["zu", verb.de])]


def words(sentence: Sentence) -> list[str]:
    """The tokens of the sentence, commas and the last mark among them."""
    front = "none" if sentence.question else sentence.front
    main = main_clause(sentence.main, front)
    if sentence.question == "why":
        main = ["warum", *main]
    if sentence.subordinate:
        side = [sentence.subordinate.conjunction.de, *verb_final(sentence.subordinate.clause)]
        first = sentence.subordinate.first
        main = [*side, ",", *main] if first else [*main, ",", *side]
    if sentence.second:
        joint, clause = sentence.second
        main += [",", joint] if joint == "aber" else [joint]
        main += main_clause(clause, "subject")
    return [*main, "?" if sentence.question else "."]
