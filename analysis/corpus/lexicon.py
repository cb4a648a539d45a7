"""The words: entries "German = English" between semicolons, read once at import."""

from collections.abc import Iterator
from dataclasses import dataclass

#: gender singular genitive plural = English [plural]; a genitive in -n marks the weak declension (den, dem Jungen)
_NOUNS = {
    "person": """
m Mann Mannes Männer = man men; f Frau Frau Frauen = woman women; n Kind Kindes Kinder = child children;
m Lehrer Lehrers Lehrer = teacher; f Lehrerin Lehrerin Lehrerinnen = teacher; m Arzt Arztes Ärzte = doctor;
m Junge Jungen Jungen = boy; f Tochter Tochter Töchter = daughter; m Sohn Sohnes Söhne = son;
m Student Studenten Studenten = student; m Nachbar Nachbarn Nachbarn = neighbour; m König Königs Könige = king;
f Königin Königin Königinnen = queen; m Bäcker Bäckers Bäcker = baker; m Bauer Bauern Bauern = farmer;
f Schwester Schwester Schwestern = sister; m Bruder Bruders Brüder = brother; f Tante Tante Tanten = aunt;
m Onkel Onkels Onkel = uncle; m Dichter Dichters Dichter = poet; m Soldat Soldaten Soldaten = soldier;
f Sängerin Sängerin Sängerinnen = singer; m Koch Kochs Köche = cook; f Richterin Richterin Richterinnen = judge;
m Gast Gastes Gäste = guest; m Freund Freundes Freunde = friend; m Polizist Polizisten Polizisten = policeman policemen""",
    "animal": """
m Hund Hundes Hunde = dog; f Katze Katze Katzen = cat; n Pferd Pferdes Pferde = horse; m Vogel Vogels Vögel = bird;
f Kuh Kuh Kühe = cow; n Schaf Schafes Schafe = sheep sheep; m Bär Bären Bären = bear; m Fuchs Fuchses Füchse = fox;
f Maus Maus Mäuse = mouse mice; m Löwe Löwen Löwen = lion; f Ente Ente Enten = duck; n Schwein Schweins Schweine = pig;
m Wolf Wolfes Wölfe = wolf wolves; f Ziege Ziege Ziegen = goat; n Kaninchen Kaninchens Kaninchen = rabbit""",
    "thing": """
m Tisch Tisches Tische = table; f Lampe Lampe Lampen = lamp; n Messer Messers Messer = knife knives;
m Stuhl Stuhls Stühle = chair; f Tasche Tasche Taschen = bag; n Glas Glases Gläser = glass; m Ball Balles Bälle = ball;
f Uhr Uhr Uhren = watch; n Fenster Fensters Fenster = window; m Schlüssel Schlüssels Schlüssel = key;
f Flasche Flasche Flaschen = bottle; n Hemd Hemdes Hemden = shirt; m Hut Hutes Hüte = hat; f Tür Tür Türen = door;
n Fahrrad Fahrrads Fahrräder = bicycle; m Wagen Wagens Wagen = car; f Kiste Kiste Kisten = box;
n Boot Bootes Boote = boat; m Mantel Mantels Mäntel = coat;
n Bett Bettes Betten = bed; m Spiegel Spiegels Spiegel = mirror; f Gabel Gabel Gabeln = fork""",
    "text": """
m Brief Briefes Briefe = letter; f Zeitung Zeitung Zeitungen = newspaper; n Buch Buches Bücher = book;
m Roman Romans Romane = novel; f Karte Karte Karten = map; n Gedicht Gedichts Gedichte = poem;
m Plan Planes Pläne = plan; f Geschichte Geschichte Geschichten = story; n Lied Liedes Lieder = song""",
    "food": """
m Apfel Apfels Äpfel = apple; f Suppe Suppe Suppen = soup; n Brot Brotes Brote = loaf loaves;
m Kuchen Kuchens Kuchen = cake; f Birne Birne Birnen = pear; n Ei Eies Eier = egg; m Fisch Fisches Fische = fish fish;
f Tomate Tomate Tomaten = tomato tomatoes; f Wurst Wurst Würste = sausage; m Käse Käses Käse = cheese""",
    "place": """
m Garten Gartens Gärten = garden; f Stadt Stadt Städte = town; n Haus Hauses Häuser = house; m Wald Waldes Wälder = forest;
f Küche Küche Küchen = kitchen; n Dorf Dorfes Dörfer = village; m Bahnhof Bahnhofs Bahnhöfe = station;
f Kirche Kirche Kirchen = church; n Zimmer Zimmers Zimmer = room; m Laden Ladens Läden = shop;
f Schule Schule Schulen = school; n Hotel Hotels Hotels = hotel; m Turm Turmes Türme = tower;
f Brücke Brücke Brücken = bridge; n Museum Museums Museen = museum; m Hafen Hafens Häfen = harbour;
f Burg Burg Burgen = castle; n Büro Büros Büros = office; m Keller Kellers Keller = cellar""",
}

#: the first parts of compounds: Garten + Tisch is Gartentisch, a garden table
_MODIFIERS = """
Garten = garden; Küchen = kitchen; Schul = school; Holz = wood; Stein = stone; Sommer = summer; Winter = winter;
Dorf = village; Berg = mountain; Wald = forest; See = lake; Markt = market; Gold = gold; Silber = silver; Papier = paper;
Abend = evening; Nacht = night; Arbeits = work; Reise = travel; Musik = music; Kunst = art; Leder = leather;
Familien = family; Hafen = harbour; Insel = island; Fluss = river; Regen = rain; Eis = ice; Feuer = fire; Kinder = child;
Weihnachts = Christmas; Sonntags = Sunday; Theater = theatre; Hochzeits = wedding; Geburtstags = birthday;
Traum = dream; Wasser = water; Luft = air; Land = country; Meer = sea"""

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

#: (kinds of subject, kinds of accusative object, kinds of dative object) -> [prefix|]infinitive er-form participle
#: [* with sein] = English past [+tail, ~tail where a pronoun comes between]
_VERBS = {
    ("person animal", "", ""): """
schlafen schläft geschlafen = sleep slept; warten wartet gewartet = wait waited; auf|wachen wacht aufgewacht* = wake woke +up;
auf|stehen steht aufgestanden* = get got +up; ein|schlafen schläft eingeschlafen* = fall fell +asleep;
an|kommen kommt angekommen* = arrive arrived; weg|laufen läuft weggelaufen* = run ran +away;
zurück|kommen kommt zurückgekommen* = come came +back; spielen spielt gespielt = play played;
schwimmen schwimmt geschwommen* = swim swam; sitzen sitzt gesessen = sit sat; bleiben bleibt geblieben* = stay stayed""",
    ("person", "", ""): """
arbeiten arbeitet gearbeitet = work worked; lachen lacht gelacht = laugh laughed; weinen weint geweint = cry cried;
singen singt gesungen = sing sang; tanzen tanzt getanzt = dance danced; lügen lügt gelogen = lie lied;
ab|fahren fährt abgefahren* = depart departed; auf|geben gibt aufgegeben = give gave +up""",
    ("person animal", "person animal", ""): """
sehen sieht gesehen = see saw; hören hört gehört = hear heard; suchen sucht gesucht = look looked +for;
finden findet gefunden = find found; beobachten beobachtet beobachtet = watch watched; retten rettet gerettet = rescue rescued;
an|sehen sieht angesehen = look looked +at; verlieren verliert verloren = lose lost""",
    ("person", "person", ""): """
fragen fragt gefragt = ask asked; begrüßen begrüßt begrüßt = greet greeted; besuchen besucht besucht = visit visited;
kennen kennt gekannt = know knew; an|rufen ruft angerufen = phone phoned; ein|laden lädt eingeladen = invite invited;
ab|holen holt abgeholt = pick picked ~up; verstehen versteht verstanden = understand understood""",
    ("person", "thing text", ""): """
kaufen kauft gekauft = buy bought; verkaufen verkauft verkauft = sell sold; brauchen braucht gebraucht = need needed;
weg|werfen wirft weggeworfen = throw threw ~away; stehlen stiehlt gestohlen = steal stole; tragen trägt getragen = carry carried;
mit|bringen bringt mitgebracht = bring brought ~along; verstecken versteckt versteckt = hide hid;
aus|wählen wählt ausgewählt = choose chose; vergessen vergisst vergessen = forget forgot; malen malt gemalt = paint painted""",
    ("person", "text", ""): """
lesen liest gelesen = read read; schreiben schreibt geschrieben = write wrote; ab|schreiben schreibt abgeschrieben = copy copied;
übersetzen übersetzt übersetzt = translate translated""",
    ("person animal", "food", ""): """
essen isst gegessen = eat ate; probieren probiert probiert = taste tasted; riechen riecht gerochen = smell smelled""",
    ("person", "food", ""): "kochen kocht gekocht = cook cooked; vor|bereiten bereitet vorbereitet = prepare prepared",
    ("person", "place", ""): """
bauen baut gebaut = build built; verlassen verlässt verlassen = leave left; auf|räumen räumt aufgeräumt = tidy tidied ~up;
schließen schließt geschlossen = close closed; zeichnen zeichnet gezeichnet = draw drew""",
    ("person animal", "", "person animal"): """
helfen hilft geholfen = help helped; folgen folgt gefolgt* = follow followed; begegnen begegnet begegnet* = meet met;
zu|hören hört zugehört = listen listened +to""",
    ("person", "", "person"): """
danken dankt gedankt = thank thanked; antworten antwortet geantwortet = answer answered; vertrauen vertraut vertraut = trust trusted""",
    ("person", "thing text food", "person"): """
geben gibt gegeben = give gave; zeigen zeigt gezeigt = show showed; schicken schickt geschickt = send sent;
bringen bringt gebracht = bring brought; leihen leiht geliehen = lend lent; verkaufen verkauft verkauft = sell sold""",
}

#: German = English, by the tenses they go with
TIMES = {
    "present": "heute = today; jetzt = now; oft = often; manchmal = sometimes; am Abend = in the evening; immer = always",
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


def _nouns() -> Iterator[Noun]:
    for kind, table in _NOUNS.items():
        for german, english in entries(table):
            en, *plural = english.split()
            regular = en + ("es" if en.endswith(("s", "x", "ch", "sh")) else "s")
            yield Noun(*german.split(), en, *(plural or [regular]), kind)


def _verbs() -> Iterator[Verb]:
    for kinds, table in _VERBS.items():
        for german, english in entries(table):
            infinitive, er, participle = german.split()
            prefix, _, base = infinitive.rpartition("|")
            en, past, *tail = english.split()
            yield Verb(
                prefix, base, er, participle.rstrip("*"), participle.endswith("*"), en, past,
                tail[0][1:] if tail else "", bool(tail) and tail[0][0] == "~", *(tuple(kind.split()) for kind in kinds),
            )  # fmt: skip


NOUNS = tuple(_nouns())
MODIFIERS = tuple(entries(_MODIFIERS))
ADJECTIVES = {
    kind: [Adjective(de.split()[0], de.split()[-1], en) for de, en in entries(table)]
    for kinds, table in _ADJECTIVES.items()
    for kind in kinds.split()
}
VERBS = tuple(_verbs())
BE = Verb("", "sein", "ist", "", True, "be", "was", subjects=("person", "animal", "thing", "text", "place", "food"))
