"""The closed classes: determiners, modals, adverbs, prepositions, conjunctions."""

from analysis.corpus.words import Adverb, Case, Conjunction, Determiner, Modal, Preposition

THE = Determiner("d", "definite", "the", "the")
A = Determiner("ein", "ein-word", "a", "")
NO = Determiner("kein", "ein-word", "a", "any")  # English negates the verb: "does not read a book"
THIS = Determiner("dies", "der-word", "this", "these")
EVERY = Determiner("jed", "der-word", "every", "")
BARE = Determiner("", "bare", "", "")
MANY = Determiner("viel", "quantifier", "many", "many")
SOME = Determiner("einig", "quantifier", "some", "some")
TWO = Determiner("zwei", "uninflected", "two", "two")
THREE = Determiner("drei", "uninflected", "three", "three")
# owned by ich, du, wir, ihr; those of the third person depend on the owner (grammar.possessive)
POSSESSIVES = {
    (1, False): Determiner("mein", "ein-word", "my", "my"),
    (2, False): Determiner("dein", "ein-word", "your", "your"),
    (1, True): Determiner("unser", "ein-word", "our", "our"),
    (2, True): Determiner("euer", "ein-word", "your", "your"),
}

MODALS = (
    Modal("können", "can", "could", True),
    Modal("müssen", "have to", "had to", False),
    Modal("wollen", "want to", "wanted to", False),
    Modal("sollen", "should", None, True),
    Modal("dürfen", "be allowed to", "be allowed to", True),
    Modal("mögen", "would like to", None, True),  # möchte
)

TIMES = (
    Adverb("heute", "today", ("present", "past", "future")),
    Adverb("jetzt", "now", ("present",)),
    Adverb("jeden Tag", "every day", ("present", "past")),
    Adverb("am Morgen", "in the morning"),
    Adverb("am Abend", "in the evening"),
    Adverb("in der Nacht", "at night", ("present",)),
    Adverb("am Wochenende", "at the weekend", ("present", "future")),
    Adverb("im Sommer", "in summer", ("present",)),
    Adverb("im Winter", "in winter", ("present",)),
    Adverb("gestern", "yesterday", ("past",)),
    Adverb("letzte Woche", "last week", ("past",)),
    Adverb("letztes Jahr", "last year", ("past",)),
    Adverb("vor zwei Tagen", "two days ago", ("past",)),
    Adverb("heute Morgen", "this morning", ("past",)),
    Adverb("morgen", "tomorrow", ("future",)),
    Adverb("bald", "soon", ("future",)),
    Adverb("nächste Woche", "next week", ("future",)),
    Adverb("nächstes Jahr", "next year", ("future",)),
)
FREQUENCIES = (
    Adverb("oft", "often", ("present", "past")),
    Adverb("immer", "always", ("present", "past")),
    Adverb("manchmal", "sometimes", ("present", "past")),
    Adverb("selten", "rarely", ("present", "past")),
    Adverb("nie", "never", ("present", "past")),
    Adverb("meistens", "usually", ("present",)),
)
MANNERS = (
    Adverb("schnell", "quickly"),
    Adverb("langsam", "slowly"),
    Adverb("leise", "quietly"),
    Adverb("vorsichtig", "carefully"),
    Adverb("heimlich", "secretly"),
    Adverb("allein", "alone"),
    Adverb("sofort", "immediately"),
    Adverb("wieder", "again"),
)
DEGREES = (Adverb("sehr", "very"), Adverb("zu", "too"), Adverb("ziemlich", "rather"))

CONJUNCTIONS = (
    Conjunction("weil", "because", (("present", "present"), ("present", "past"), ("past", "past"))),
    Conjunction("obwohl", "although", (("present", "present"), ("past", "past"))),
    Conjunction("wenn", "if", (("present", "present"), ("future", "present"))),
    Conjunction("sobald", "as soon as", (("present", "present"), ("future", "present"))),
    Conjunction("während", "while", (("present", "present"), ("past", "past"))),
    Conjunction("bevor", "before", (("present", "present"), ("past", "past"))),
    Conjunction("als", "when", (("past", "past"),)),
    Conjunction("nachdem", "after", (("past", "pluperfect"),)),
)

ON_FURNITURE = (
    Preposition("auf", "on"),
    Preposition("unter", "under"),
    Preposition("neben", "next to"),
    Preposition("hinter", "behind"),
    Preposition("vor", "in front of"),
)
# with the kinds of event they go with
CIRCUMSTANCES: tuple[tuple[Preposition, Case, tuple[str, ...]], ...] = (
    (Preposition("wegen", "because of"), "genitive", ("cause",)),
    (Preposition("trotz", "despite"), "genitive", ("cause",)),
    (Preposition("während", "during"), "genitive", ("occasion", "work")),
    (Preposition("nach", "after"), "dative", ("occasion", "work")),
    (Preposition("vor", "before"), "dative", ("occasion", "work")),
)
