"""English: inflection, do-support, a/an and word order."""

from analysis.corpus.syntax import (
    Clause,
    Complement,
    Coordination,
    Gap,
    NounPhrase,
    Phrase,
    PrepPhrase,
    Pronoun,
    Sentence,
    agreement,
    gap_role,
)
from analysis.corpus.words import Adverb

# (person, plural, gender) -> subject, object
_PRONOUNS = {
    (1, False, ""): ("I", "me"),
    (2, False, ""): ("you", "you"),
    (3, False, "m"): ("he", "him"),
    (3, False, "f"): ("she", "her"),
    (1, True, ""): ("we", "us"),
    (2, True, ""): ("you", "you"),
    (3, True, ""): ("they", "them"),
}
_AN_BY_SOUND = {"honest": "an", "useful": "a"}  # where the first letter misleads
_JOINTS = {"und": "and", "aber": "but"}


def _ends_in_consonant_y(word: str) -> bool:
    return word.endswith("y") and word[-2] not in "aeiou"


def plural_of(noun: str) -> str:
    """Regular plural, and equally the regular third person: city -> cities, box -> boxes."""
    if _ends_in_consonant_y(noun):
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "z", "ch", "sh")) else "s")


def third_person(verb: str) -> str:
    return {"have": "has", "do": "does", "go": "goes"}.get(verb) or plural_of(verb)


def regular_past(verb: str) -> str:
    if _ends_in_consonant_y(verb):
        return verb[:-1] + "ied"
    return verb + ("d" if verb.endswith("e") else "ed")


def _be(person: int, plural: bool, past: bool) -> str:
    if plural or person == 2:
        return "were" if past else "are"
    return "was" if past else {1: "am", 3: "is"}[person]


def _with_article(determiner: str, word: str) -> str:
    if determiner != "a":
        return determiner
    return _AN_BY_SOUND.get(word) or ("an" if word[0] in "aeiou" else "a")


def noun_phrase(phrase: NounPhrase) -> list[str]:
    noun = phrase.noun.en_plural if phrase.plural else phrase.noun.en
    core = [phrase.adjective.en, noun] if phrase.adjective else [noun]
    countable = bool(phrase.noun.de_plural)
    if phrase.owner:
        *before, last = noun_phrase(phrase.owner)
        first = [*before, last + ("'" if phrase.owner.plural and last.endswith("s") else "'s")]
    else:
        plural_form = phrase.plural or not countable
        determiner = phrase.determiner.en_plural if plural_form else phrase.determiner.en
        if phrase.determiner.de == "dies" and not phrase.plural:
            determiner = phrase.determiner.en  # this milk, but no "these milk"
        first = [_with_article(determiner, core[0])] if determiner else []
    words = [*first, *core]
    if phrase.relative:
        words += finite_clause(phrase.relative)
    return words


def _phrase(phrase: Phrase, is_subject: bool) -> list[str]:
    match phrase:
        case Pronoun(person, plural, gender):
            return [_PRONOUNS[person, plural, gender][0 if is_subject else 1]]
        case Gap(noun, _):
            return ["that"] if "person" not in noun.kinds else ["who" if is_subject else "whom"]
        case Coordination(first, second):
            return [*noun_phrase(first), "and", *noun_phrase(second)]
        case NounPhrase():
            return noun_phrase(phrase)


def _prep_phrase(phrase: PrepPhrase) -> list[str]:
    words = ["which"] if isinstance(phrase.phrase, Gap) else _phrase(phrase.phrase, False)
    return [phrase.preposition.en, *words]


def _adverbial(item: Adverb | PrepPhrase) -> list[str]:
    return [item.en] if isinstance(item, Adverb) else _prep_phrase(item)


def _verb_group(clause: Clause) -> tuple[str, str, str, list[str]]:
    """(auxiliary, finite verb, its base, the rest); one of auxiliary and finite is empty."""
    person, plural = agreement(clause.subject)
    singular = person == 3 and not plural
    past, verb = clause.tense == "past", clause.verb.en
    if clause.modal:
        forms = clause.modal.past if past else clause.modal.present
        assert forms is not None
        head, *rest = [*forms.split(), verb.base]
        if head == "be":
            return _be(person, plural, past), "", "", rest
        if clause.modal.auxiliary:
            return head, "", "", rest
        finite = third_person(head) if singular and not past else head
        return "", finite, clause.modal.present.split()[0], rest
    if clause.tense == "future":
        return "will", "", "", [verb.base]
    if clause.tense == "pluperfect":
        return "had", "", "", [verb.participle]
    if verb.base == "be":
        return _be(person, plural, past), "", "", []
    if past:
        return "", verb.past, verb.base, []
    return "", third_person(verb.base) if singular else verb.base, verb.base, []


def _objects(clause: Clause) -> dict[str, list[str]]:
    """Verb tail, objects and the rest of the predicate, in English order."""
    verb = clause.verb.en
    tail = [verb.tail] if verb.tail else []
    dative = _phrase(clause.dative, False) if clause.dative else []
    accusative = _phrase(clause.accusative, False) if clause.accusative else []
    with_to = clause.verb.frame == "ditransitive-to"
    if clause.verb.frame.startswith("ditransitive") and (with_to or isinstance(clause.dative, Gap)):
        parts = {"tail": tail, "accusative": accusative, "dative": ["to", *dative]}
    elif verb.pronoun_splits and isinstance(clause.accusative, Pronoun):
        parts = {"accusative": accusative, "tail": tail}
    else:
        parts = {"tail": tail, "dative": dative, "accusative": accusative}
    if clause.oblique:
        parts["oblique"] = _phrase(clause.oblique.phrase, False)
    if clause.predicate:
        degree, adjective = clause.predicate
        parts["predicate"] = [degree.en, adjective.en] if degree else [adjective.en]
    if clause.manner:
        parts["manner"] = [clause.manner.en]
    if clause.place:
        parts["place"] = _prep_phrase(clause.place)
    if clause.time:
        parts["time"] = _adverbial(clause.time)
    return parts


def _complement(complement: Complement | None) -> list[str]:
    if complement is None:
        return []
    if complement.kind in ("dass", "ob"):
        return ["that" if complement.kind == "dass" else "whether", *finite_clause(complement.clause)]
    clause = complement.clause
    marker = ["in", "order"] if complement.kind == "um" else []
    negation = ["not"] if clause.negated else []
    return [*marker, *negation, "to", clause.verb.en.base, *_flat(_objects(clause))]


def _flat(parts: dict[str, list[str]]) -> list[str]:
    return [word for words in parts.values() for word in words]


def finite_clause(clause: Clause, front: str = "subject", question: bool = False) -> list[str]:
    """Subject, verb, object; a fronted adverbial or a relative pronoun comes first, as does a question's auxiliary."""
    parts = _objects(clause)
    role = gap_role(clause)
    first = parts.pop(role) if role not in ("", "subject") else []
    if front in ("time", "place"):
        first = parts.pop(front)
    auxiliary, finite, base, rest = _verb_group(clause)
    person, plural = agreement(clause.subject)
    if not auxiliary and (clause.negated or question):
        do = "did" if clause.tense == "past" else third_person("do") if person == 3 and not plural else "do"
        auxiliary, rest = do, [base, *rest]
        finite = ""
    subject = _phrase(clause.subject, True)
    if auxiliary == "can" and clause.negated and not question:
        auxiliary, negation = "cannot", []
    else:
        negation = ["not"] if clause.negated else []
    head = [auxiliary, *subject] if question else [*subject, auxiliary]
    adverbs = [*negation, clause.frequency.en] if clause.frequency else negation
    spoken = [*first, *head, *adverbs, finite, *rest, *_flat(parts), *_complement(clause.complement)]
    return [word for word in spoken if word]


def words(sentence: Sentence) -> list[str]:
    """The tokens of the sentence, commas and the last mark among them."""
    main = finite_clause(sentence.main, sentence.front, bool(sentence.question))
    if sentence.question == "why":
        main = ["why", *main]
    if sentence.subordinate:
        side = [sentence.subordinate.conjunction.en, *finite_clause(sentence.subordinate.clause)]
        main = [*side, ",", *main] if sentence.subordinate.first else [*main, *side]
    if sentence.second:
        joint, clause = sentence.second
        main += [",", _JOINTS[joint]] if joint == "aber" else [_JOINTS[joint]]
        main += finite_clause(clause)
    return [*main, "?" if sentence.question else "."]
