"""Nouns and the adjectives that go with them: tables to be read by a person, parsed once at import.

German | gender | plural (- for none) | genitive singular | English[/irregular plural] | kinds
German[/stem] | English | kinds
"""

from analysis.corpus.english import plural_of
from analysis.corpus.words import Adjective, Noun, rows

_NOUNS = """
Mann | m | Männer | Mannes | man/men | person
Frau | f | Frauen | Frau | woman/women | person
Kind | n | Kinder | Kindes | child/children | person
Junge | m | Jungen | Jungen | boy | person
Mädchen | n | Mädchen | Mädchens | girl | person
Vater | m | Väter | Vaters | father | person
Mutter | f | Mütter | Mutter | mother | person
Bruder | m | Brüder | Bruders | brother | person
Schwester | f | Schwestern | Schwester | sister | person
Sohn | m | Söhne | Sohnes | son | person
Tochter | f | Töchter | Tochter | daughter | person
Onkel | m | Onkel | Onkels | uncle | person
Tante | f | Tanten | Tante | aunt | person
Großvater | m | Großväter | Großvaters | grandfather | person
Großmutter | f | Großmütter | Großmutter | grandmother | person
Freund | m | Freunde | Freundes | friend | person
Nachbar | m | Nachbarn | Nachbarn | neighbour | person
Student | m | Studenten | Studenten | student | person
Schüler | m | Schüler | Schülers | pupil | person
Arzt | m | Ärzte | Arztes | doctor | person
Lehrerin | f | Lehrerinnen | Lehrerin | teacher | person
Bäcker | m | Bäcker | Bäckers | baker | person
Gärtner | m | Gärtner | Gärtners | gardener | person
König | m | Könige | Königs | king | person
Königin | f | Königinnen | Königin | queen | person
Polizist | m | Polizisten | Polizisten | policeman/policemen | person
Soldat | m | Soldaten | Soldaten | soldier | person
Bauer | m | Bauern | Bauern | farmer | person
Kellnerin | f | Kellnerinnen | Kellnerin | waitress | person
Sängerin | f | Sängerinnen | Sängerin | singer | person
Malerin | f | Malerinnen | Malerin | painter | person
Richterin | f | Richterinnen | Richterin | judge | person
Tourist | m | Touristen | Touristen | tourist | person
Gast | m | Gäste | Gastes | guest | person
Kollege | m | Kollegen | Kollegen | colleague | person
Kunde | m | Kunden | Kunden | customer | person
Verkäuferin | f | Verkäuferinnen | Verkäuferin | saleswoman/saleswomen | person
Dichter | m | Dichter | Dichters | poet | person
Fahrer | m | Fahrer | Fahrers | driver | person
Hund | m | Hunde | Hundes | dog | animal
Katze | f | Katzen | Katze | cat | animal
Pferd | n | Pferde | Pferdes | horse | animal
Vogel | m | Vögel | Vogels | bird | animal
Maus | f | Mäuse | Maus | mouse/mice | animal
Kuh | f | Kühe | Kuh | cow | animal
Schaf | n | Schafe | Schafes | sheep/sheep | animal
Ente | f | Enten | Ente | duck | animal
Fuchs | m | Füchse | Fuchses | fox | animal
Bär | m | Bären | Bären | bear | animal
Affe | m | Affen | Affen | monkey | animal
Elefant | m | Elefanten | Elefanten | elephant | animal
Gans | f | Gänse | Gans | goose/geese | animal
Esel | m | Esel | Esels | donkey | animal
Wolf | m | Wölfe | Wolfes | wolf/wolves | animal
Huhn | n | Hühner | Huhns | chicken | animal
Schlange | f | Schlangen | Schlange | snake | animal
Buch | n | Bücher | Buches | book | text
Brief | m | Briefe | Briefes | letter | text
Zeitung | f | Zeitungen | Zeitung | newspaper | text
Gedicht | n | Gedichte | Gedichts | poem | text
Bericht | m | Berichte | Berichts | report | text
Roman | m | Romane | Romans | novel | text
Artikel | m | Artikel | Artikels | article | text
Nachricht | f | Nachrichten | Nachricht | message | text
Geschichte | f | Geschichten | Geschichte | story | text tale
Märchen | n | Märchen | Märchens | fairy tale | text tale
Witz | m | Witze | Witzes | joke | tale
Apfel | m | Äpfel | Apfels | apple | food
Kuchen | m | Kuchen | Kuchens | cake | food
Suppe | f | Suppen | Suppe | soup | food
Ei | n | Eier | Eies | egg | food
Birne | f | Birnen | Birne | pear | food
Kartoffel | f | Kartoffeln | Kartoffel | potato/potatoes | food
Tomate | f | Tomaten | Tomate | tomato/tomatoes | food
Orange | f | Orangen | Orange | orange | food
Keks | m | Kekse | Kekses | biscuit | food
Kirsche | f | Kirschen | Kirsche | cherry | food
Brot | n | - | Brotes | bread | food
Käse | m | - | Käses | cheese | food
Fleisch | n | - | Fleisches | meat | food
Reis | m | - | Reises | rice | food
Honig | m | - | Honigs | honey | food
Wasser | n | - | Wassers | water | drink
Milch | f | - | Milch | milk | drink
Kaffee | m | - | Kaffees | coffee | drink
Tee | m | - | Tees | tea | drink
Wein | m | - | Weins | wine | drink
Saft | m | - | Safts | juice | drink
Bier | n | - | Bieres | beer | drink
Ball | m | Bälle | Balles | ball | thing
Schlüssel | m | Schlüssel | Schlüssels | key | thing
Tasche | f | Taschen | Tasche | bag | thing
Lampe | f | Lampen | Lampe | lamp | thing
Uhr | f | Uhren | Uhr | clock | thing
Messer | n | Messer | Messers | knife/knives | thing
Spiegel | m | Spiegel | Spiegels | mirror | thing
Regenschirm | m | Regenschirme | Regenschirms | umbrella | thing
Bild | n | Bilder | Bildes | picture | thing
Geschenk | n | Geschenke | Geschenks | present | thing
Teller | m | Teller | Tellers | plate | thing
Glas | n | Gläser | Glases | glass | thing
Tasse | f | Tassen | Tasse | cup | thing
Blume | f | Blumen | Blume | flower | thing
Ring | m | Ringe | Ringes | ring | thing
Telefon | n | Telefone | Telefons | telephone | thing
Kamera | f | Kameras | Kamera | camera | thing
Korb | m | Körbe | Korbes | basket | thing
Decke | f | Decken | Decke | blanket | thing
Gitarre | f | Gitarren | Gitarre | guitar | thing
Koffer | m | Koffer | Koffers | suitcase | thing openable
Paket | n | Pakete | Pakets | parcel | thing openable
Flasche | f | Flaschen | Flasche | bottle | thing openable
Tür | f | Türen | Tür | door | openable
Fenster | n | Fenster | Fensters | window | openable
Tor | n | Tore | Tores | gate | openable
Mantel | m | Mäntel | Mantels | coat | garment
Hut | m | Hüte | Hutes | hat | garment
Hemd | n | Hemden | Hemdes | shirt | garment
Kleid | n | Kleider | Kleides | dress | garment
Jacke | f | Jacken | Jacke | jacket | garment
Schuh | m | Schuhe | Schuhs | shoe | garment
Rock | m | Röcke | Rockes | skirt | garment
Pullover | m | Pullover | Pullovers | jumper | garment
Auto | n | Autos | Autos | car | vehicle car
Bus | m | Busse | Busses | bus | vehicle car
Lastwagen | m | Lastwagen | Lastwagens | lorry | vehicle car
Zug | m | Züge | Zuges | train | vehicle
Fahrrad | n | Fahrräder | Fahrrads | bicycle | vehicle
Motorrad | n | Motorräder | Motorrads | motorcycle | vehicle
Schiff | n | Schiffe | Schiffes | ship | vehicle
Boot | n | Boote | Bootes | boat | vehicle
Tisch | m | Tische | Tisches | table | furniture
Stuhl | m | Stühle | Stuhls | chair | furniture
Bett | n | Betten | Bettes | bed | furniture
Schrank | m | Schränke | Schranks | cupboard | furniture
Sofa | n | Sofas | Sofas | sofa | furniture
Bank | f | Bänke | Bank | bench | furniture
Regal | n | Regale | Regals | shelf/shelves | furniture
Garten | m | Gärten | Gartens | garden | place
Haus | n | Häuser | Hauses | house | place building
Küche | f | Küchen | Küche | kitchen | place room
Schule | f | Schulen | Schule | school | place building
Stadt | f | Städte | Stadt | city | place
Park | m | Parks | Parks | park | place
Wald | m | Wälder | Waldes | forest | place
Zimmer | n | Zimmer | Zimmers | room | place room
Büro | n | Büros | Büros | office | place room
Kirche | f | Kirchen | Kirche | church | place building
Bibliothek | f | Bibliotheken | Bibliothek | library | place building
Museum | n | Museen | Museums | museum | place building
Restaurant | n | Restaurants | Restaurants | restaurant | place
Hotel | n | Hotels | Hotels | hotel | place building
Dorf | n | Dörfer | Dorfes | village | place
Krankenhaus | n | Krankenhäuser | Krankenhauses | hospital | place building
Keller | m | Keller | Kellers | cellar | place room
Hof | m | Höfe | Hofes | yard | place
Turm | m | Türme | Turmes | tower | place building
Werkstatt | f | Werkstätten | Werkstatt | workshop | place room
Laden | m | Läden | Ladens | shop | place
Regen | m | - | Regens | rain | cause
Lärm | m | - | Lärms | noise | cause
Schnee | m | - | Schnees | snow | cause
Hitze | f | - | Hitze | heat | cause
Sturm | m | Stürme | Sturms | storm | cause
Unfall | m | Unfälle | Unfalls | accident | cause
Konzert | n | Konzerte | Konzerts | concert | occasion
Reise | f | Reisen | Reise | journey | occasion
Hochzeit | f | Hochzeiten | Hochzeit | wedding | occasion
Spiel | n | Spiele | Spiels | game | occasion
Fest | n | Feste | Festes | party | occasion
Ausflug | m | Ausflüge | Ausflugs | trip | occasion
Prüfung | f | Prüfungen | Prüfung | exam | work
Arbeit | f | - | Arbeit | work | work
Übung | f | Übungen | Übung | exercise | work
Frage | f | Fragen | Frage | question | idea
Antwort | f | Antworten | Antwort | answer | idea
Plan | m | Pläne | Plans | plan | idea
Regel | f | Regeln | Regel | rule | idea
Problem | n | Probleme | Problems | problem | idea problem
Rätsel | n | Rätsel | Rätsels | riddle | problem
Fehler | m | Fehler | Fehlers | mistake | idea
"""

_ADJECTIVES = """
alt | old | person animal text thing garment vehicle furniture place building
jung | young | person animal
klein | small | person animal thing vehicle furniture place openable
groß | big | animal thing vehicle furniture place openable
müde/müd | tired | person animal
freundlich | friendly | person
hungrig | hungry | person animal
krank | ill | person animal
traurig | sad | person tale
glücklich | happy | person
klug | clever | person animal
reich | rich | person
arm | poor | person
höflich | polite | person
ehrlich | honest | person
berühmt | famous | person place
stark | strong | person animal
wütend | angry | person animal
wild | wild | animal
schnell | fast | animal vehicle
gefährlich | dangerous | animal occasion
neu | new | text thing garment vehicle furniture place idea
schön | beautiful | thing garment place occasion
teuer/teur | expensive | thing garment vehicle furniture occasion
billig | cheap | thing garment vehicle furniture
schwer | heavy | thing furniture openable
leicht | light | thing
kaputt | broken | thing vehicle openable
nützlich | useful | thing idea
rot | red | thing garment vehicle furniture
blau | blue | thing garment vehicle furniture
grün | green | thing garment vehicle
weiß | white | thing garment vehicle furniture
schwarz | black | garment vehicle animal
warm | warm | garment drink place
kalt | cold | drink food place
heiß | hot | drink
frisch | fresh | food drink
süß | sweet | food
lecker | tasty | food
lang | long | text tale occasion
kurz | short | text tale occasion
interessant | interesting | text tale occasion idea
langweilig | boring | text tale occasion work
lustig | funny | tale
wichtig | important | text idea work
schwierig | difficult | idea problem work
einfach | easy | problem work
ruhig | quiet | place
dunkel/dunkl | dark | place
sauber | clean | place garment
schmutzig | dirty | place garment
stark | heavy | cause
plötzlich | sudden | cause
"""


def _noun(row: list[str]) -> Noun:
    de, gender, plural, genitive, english, kinds = row
    en, _, en_plural = english.partition("/")
    return Noun(
        de=de,
        gender=gender,  # type: ignore[arg-type]
        de_plural="" if plural == "-" else plural,
        genitive=genitive,
        en=en,
        en_plural=en_plural or plural_of(en),
        kinds=tuple(kinds.split()),
    )


def _adjective(row: list[str]) -> Adjective:
    de, _, stem = row[0].partition("/")
    return Adjective(de, stem or de, row[1], tuple(row[2].split()))


NOUNS = tuple(_noun(row) for row in rows(_NOUNS))
ADJECTIVES = tuple(_adjective(row) for row in rows(_ADJECTIVES))
