"""The words: entries "German = English" between semicolons, read once at import."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

#: gender, singular, genitive, plural = English [plural if irregular]; genitives in -n are of the weak declension
_NOUNS = {
    "person": """
m Mann -es Männer = man men; f Frau - -en = woman women; n Kind -es -er = child children; m Lehrer -s - = teacher;
f Lehrerin - -nen = teacher; m Arzt -es Ärzte = doctor; m Junge -n -n = boy; f Tochter - Töchter = daughter;
m Sohn -es Söhne = son; m Student -en -en = student; m Nachbar -n -n = neighbour; m König -s -e = king;
f Königin - -nen = queen; m Bäcker -s - = baker; m Bauer -n -n = farmer; f Schwester - -n = sister;
m Bruder -s Brüder = brother; f Tante - -n = aunt; m Onkel -s - = uncle; m Dichter -s - = poet;
m Soldat -en -en = soldier; f Sängerin - -nen = singer; m Koch -s Köche = cook; f Richterin - -nen = judge;
m Gast -es Gäste = guest; m Freund -es -e = friend; m Polizist -en -en = policeman policemen""",
    "animal": """
m Hund -es -e = dog; f Katze - -n = cat; n Pferd -es -e = horse; m Vogel -s Vögel = bird; f Kuh - Kühe = cow;
n Schaf -es -e = sheep sheep; m Bär -en -en = bear; m Fuchs -es Füchse = fox; f Maus - Mäuse = mouse mice;
m Löwe -n -n = lion; f Ente - -n = duck; n Schwein -s -e = pig; m Wolf -es Wölfe = wolf wolves; f Ziege - -n = goat;
n Kaninchen -s - = rabbit""",
    "thing": """
m Tisch -es -e = table; f Lampe - -n = lamp; n Messer -s - = knife knives; m Stuhl -s Stühle = chair;
f Tasche - -n = bag; n Glas -es Gläser = glass; m Ball -es Bälle = ball; f Uhr - -en = watch; n Fenster -s - = window;
m Schlüssel -s - = key; f Flasche - -n = bottle; n Hemd -es -en = shirt; m Hut -es Hüte = hat; f Tür - -en = door;
n Fahrrad -s Fahrräder = bicycle; m Wagen -s - = car; f Kiste - -n = box; n Boot -es -e = boat;
m Mantel -s Mäntel = coat; n Bett -es -en = bed; m Spiegel -s - = mirror; f Gabel - -n = fork""",
    "text": """
m Brief -es -e = letter; f Zeitung - -en = newspaper; n Buch -es Bücher = book; m Roman -s -e = novel;
f Karte - -n = map; n Gedicht -s -e = poem; m Plan -es Pläne = plan; f Geschichte - -n = story;
n Lied -es -er = song""",
    "food": """
m Apfel -s Äpfel = apple; f Suppe - -n = soup; n Brot -es -e = loaf loaves; m Kuchen -s - = cake; f Birne - -n = pear;
n Ei -es -er = egg; m Fisch -es -e = fish fish; f Tomate - -n = tomato; f Wurst - Würste = sausage;
m Käse -s - = cheese""",
    "place": """
m Garten -s Gärten = garden; f Stadt - Städte = town; n Haus -es Häuser = house; m Wald -es Wälder = forest;
f Küche - -n = kitchen; n Dorf -es Dörfer = village; m Bahnhof -s Bahnhöfe = station; f Kirche - -n = church;
n Zimmer -s - = room; m Laden -s Läden = shop; f Schule - -n = school; n Hotel -s -s = hotel; m Turm -es Türme = tower;
f Brücke - -n = bridge; n Museum -s Museen = museum; m Hafen -s Häfen = harbour; f Burg - -en = castle;
n Büro -s -s = office; m Keller -s - = cellar""",
}

#: the first parts of compounds: Garten + Tisch is Gartentisch, a garden table
_MODIFIERS = """
Garten = garden; Küchen = kitchen; Schul = school; Holz = wood; Stein = stone; Sommer = summer; Winter = winter;
Dorf = village; Berg = mountain; Wald = forest; See = lake; Markt = market; Gold = gold; Silber = silver;
Papier = paper; Abend = evening; Nacht = night; Arbeits = work; Reise = travel; Musik = music; Kunst = art;
Leder = leather; Familien = family; Hafen = harbour; Insel = island; Fluss = river; Regen = rain; Eis = ice;
Feuer = fire; Kinder = child; Weihnachts = Christmas; Sonntags = Sunday; Theater = theatre; Hochzeits = wedding;
Geburtstags = birthday; Traum = dream; Wasser = water; Luft = air; Land = country; Meer = sea"""

#: kinds of noun -> German [stem that takes the endings] = English
_ADJECTIVES = {
    "person animal": """
alt = old; jung = young; klein = small; groß = big; müde müd = tired; ruhig = calm; laut = loud; schnell = fast;
langsam = slow; stark = strong; schwach = weak; berühmt = famous; freundlich = friendly; traurig = sad;
fröhlich = cheerful; hungrig = hungry; höflich = polite; klug = clever; vorsichtig = careful; mutig = brave""",
    "thing text food place": """
alt = old; neu = new; klein = small; groß = big; schön = beautiful; teuer teur = expensive; dunkel dunkl = dark;
rot = red; blau = blue; grün = green; weiß = white; schwer = heavy; leicht = light; kalt = cold; warm = warm;
seltsam = strange; schmutzig = dirty; sauber = clean; hässlich = ugly; wichtig = important; billig = cheap""",
}

#: (kinds of subject, of accusative, of dative) -> [prefix|]infinitive [er-form participle, if irregular; * with sein]
#: = English [past, if irregular] [+tail, ~tail where a pronoun comes between]
_VERBS = {
    ("person animal", "", ""): """
schlafen schläft geschlafen = sleep slept; warten = wait; auf|wachen wacht aufgewacht* = wake woke +up;
auf|stehen steht aufgestanden* = get got +up; ein|schlafen schläft eingeschlafen* = fall fell +asleep;
an|kommen kommt angekommen* = arrive; weg|laufen läuft weggelaufen* = run ran +away;
zurück|kommen kommt zurückgekommen* = come came +back; spielen = play; schwimmen schwimmt geschwommen* = swim swam;
sitzen sitzt gesessen = sit sat; bleiben bleibt geblieben* = stay""",
    ("person", "", ""): """
arbeiten = work; lachen = laugh; weinen = cry; singen singt gesungen = sing sang; tanzen = dance;
lügen lügt gelogen = lie; ab|fahren fährt abgefahren* = depart; auf|geben gibt aufgegeben = give gave +up""",
    ("person animal", "person animal", ""): """
sehen sieht gesehen = see saw; hören = hear heard; suchen = look +for; finden findet gefunden = find found;
beobachten beobachtet beobachtet = watch; retten = rescue; an|sehen sieht angesehen = look +at;
verlieren verliert verloren = lose lost""",
    ("person", "person", ""): """
fragen = ask; begrüßen begrüßt begrüßt = greet; besuchen besucht besucht = visit; kennen kennt gekannt = know knew;
an|rufen ruft angerufen = phone; ein|laden lädt eingeladen = invite; ab|holen = pick ~up;
verstehen versteht verstanden = understand understood""",
    ("person", "thing text", ""): """
kaufen = buy bought; verkaufen verkauft verkauft = sell sold; brauchen = need;
weg|werfen wirft weggeworfen = throw threw ~away; stehlen stiehlt gestohlen = steal stole;
tragen trägt getragen = carry; mit|bringen bringt mitgebracht = bring brought ~along;
verstecken versteckt versteckt = hide hid; aus|wählen = choose chose; vergessen vergisst vergessen = forget forgot;
malen = paint""",
    ("person", "text", ""): """
lesen liest gelesen = read read; schreiben schreibt geschrieben = write wrote;
ab|schreiben schreibt abgeschrieben = copy; übersetzen übersetzt übersetzt = translate""",
    ("person animal", "food", ""): """
essen isst gegessen = eat ate; probieren probiert probiert = taste; riechen riecht gerochen = smell""",
    ("person", "food", ""): """
kochen = cook; vor|bereiten bereitet vorbereitet = prepare""",
    ("person", "place", ""): """
bauen = build built; verlassen verlässt verlassen = leave left; auf|räumen = tidy ~up;
schließen schließt geschlossen = close; zeichnen zeichnet gezeichnet = draw drew""",
    ("person animal", "", "person animal"): """
helfen hilft geholfen = help; folgen folgt gefolgt* = follow; begegnen begegnet begegnet* = meet met;
zu|hören = listen +to""",
    ("person", "", "person"): """
danken = thank; antworten = answer; vertrauen vertraut vertraut = trust""",
    ("person", "thing text food", "person"): """
geben gibt gegeben = give gave; zeigen = show; schicken = send sent; bringen bringt gebracht = bring brought;
leihen leiht geliehen = lend lent; verkaufen verkauft verkauft = sell sold""",
}

#: German = English, by the tenses they go with
_TIMES = {
    "present": "heute = today; jetzt = now; oft = often; manchmal = sometimes; am Abend = in the evening",
    "past": "gestern = yesterday; am Morgen = in the morning; letzte Woche = last week; vor zwei Tagen = two days ago",
    "future": "morgen = tomorrow; bald = soon; nächstes Jahr = next year; am Sonntag = on Sunday; später = later",
}
#: (German, case, English, kinds)
PREPOSITIONS = (
    ("in", "dative", "in", "place"),
    ("vor", "dative", "in front of", "place"),
    ("hinter", "dative", "behind", "place thing"),
    ("neben", "dative", "next to", "place thing person"),
    ("mit", "dative", "with", "person animal"),
    ("ohne", "accusative", "without", "person animal"),
    ("für", "accusative", "for", "person"),
)


@dataclass(frozen=True)
class Noun:
    gender: str  #: m, f or n
    de: str
    genitive: str
    plural: str
    en: str
    en_plural: str
    kind: str


@dataclass(frozen=True)
class Adjective:
    de: str
    stem: str
    en: str


@dataclass(frozen=True)
class Verb:
    prefix: str  #: separable
    de: str  #: infinitive without it
    er: str
    participle: str
    sein: bool  #: its perfect is formed with sein
    en: str
    past: str
    tail: str = ""  #: wake UP
    splits: bool = False  #: pick him UP
    subjects: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    datives: tuple[str, ...] = ()


def entries(table: str) -> Iterator[tuple[str, str]]:
    """(German, English) of each entry."""
    for entry in table.split(";"):
        german, _, english = entry.partition(" = ")
        yield german.strip(), english.strip()


def with_s(word: str) -> str:
    """The plural of a regular noun; the third person of a verb."""
    if word[-1] == "y" and word[-2] not in "aeou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "sh", "ch", "x", "o")) else "s")


def _nouns() -> Iterator[Noun]:
    for kind, table in _NOUNS.items():
        for german, english in entries(table):
            gender, de, *endings = german.split()
            genitive, plural = (de + form[1:] if form.startswith("-") else form for form in endings)
            en, *irregular = english.split()
            yield Noun(gender, de, genitive, plural, en, irregular[0] if irregular else with_s(en), kind)


def _verbs() -> Iterator[Verb]:
    for kinds, table in _VERBS.items():
        for german, english in entries(table):
            infinitive, *irregular = german.split()
            prefix, _, base = infinitive.rpartition("|")
            er = base[:-2] + ("et" if base[-3] in "dt" else "t")
            er, participle = irregular or (er, f"{prefix}ge{er}")
            en, *rest = english.split()
            tail = rest.pop() if rest and rest[-1][0] in "+~" else ""
            regular = en + "d" if en[-1] == "e" else re.sub("([^aeo])y$", r"\1i", en) + "ed"
            past = rest[0] if rest else regular
            forms = prefix, base, er, participle.rstrip("*"), participle.endswith("*"), en, past
            yield Verb(*forms, tail[1:], tail.startswith("~"), *(tuple(kind.split()) for kind in kinds))


NOUNS = tuple(_nouns())
TIMES = {tense: tuple(entries(table)) for tense, table in _TIMES.items()}
MODIFIERS = tuple(entries(_MODIFIERS))
ADJECTIVES = {
    kind: [Adjective(de.split()[0], de.split()[-1], en) for de, en in entries(table)]
    for kinds, table in _ADJECTIVES.items()
    for kind in kinds.split()
}
VERBS = tuple(_verbs())
BE = Verb("", "sein", "ist", "", True, "be", "was", subjects=("person", "animal", "thing", "text", "place", "food"))
