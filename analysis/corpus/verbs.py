"""Verbs by what they take beside their subject: tables to be read by a person, parsed once at import.

[sich] prefix|infinitive [du-form er-form] | participle [sein] | English | subject kinds | object kinds
English is "base [past participle]", then "+ tail" (look + for) or "~ particle" (put ~ on: "put it on").
"""

from analysis.corpus.english import regular_past
from analysis.corpus.german import regular_forms
from analysis.corpus.words import Case, EnglishVerb, Verb, rows

# frame -> rows; a frame is what the verb takes beside its subject (see grammar.FRAMES)
_VERBS = {
    "intransitive": """
schlafen schläfst schläft | geschlafen | sleep slept slept | person animal
arbeiten | gearbeitet | work | person
lachen | gelacht | laugh | person
weinen | geweint | cry | person
tanzen | getanzt | dance | person
singen | gesungen | sing sang sung | person
schwimmen | geschwommen sein | swim swam swum | person animal
warten | gewartet | wait | person animal
spielen | gespielt | play | person animal
kochen | gekocht | cook | person
auf|stehen | aufgestanden sein | get got got + up | person
auf|wachen | aufgewacht sein | wake woke woken + up | person animal
ein|schlafen schläfst schläft | eingeschlafen sein | fall fell fallen + asleep | person animal
an|kommen | angekommen sein | arrive | person vehicle
ab|fahren fährst fährt | abgefahren sein | depart | vehicle
zurück|kommen | zurückgekommen sein | come came come + back | person animal vehicle
weg|laufen läufst läuft | weggelaufen sein | run ran run + away | person animal
""",
    "transitive": """
lesen liest liest | gelesen | read read read | person | text
schreiben | geschrieben | write wrote written | person | text
kaufen | gekauft | buy bought bought | person | thing text food drink garment vehicle furniture
verkaufen | verkauft | sell sold sold | person | thing text food garment vehicle furniture animal
essen isst isst | gegessen | eat ate eaten | person animal | food
trinken | getrunken | drink drank drunk | person | drink
probieren | probiert | taste | person | food drink
suchen | gesucht | look + for | person animal | person animal thing text garment
finden | gefunden | find found found | person animal | person animal thing text
besuchen | besucht | visit | person | person place
fragen | gefragt | ask | person | person
begrüßen | begrüßt | greet | person | person
waschen wäschst wäscht | gewaschen | wash | person | garment vehicle
tragen trägst trägt | getragen | wear wore worn | person | garment
reparieren | repariert | repair | person | vehicle openable
bauen | gebaut | build built built | person | building furniture
öffnen | geöffnet | open | person | openable
schließen | geschlossen | close | person | openable
an|rufen | angerufen | phone | person | person
ab|holen | abgeholt | pick ~ up | person | person thing
an|ziehen | angezogen | put put put ~ on | person | garment
aus|ziehen | ausgezogen | take took taken ~ off | person | garment
ein|laden lädst lädt | eingeladen | invite | person | person
mit|bringen | mitgebracht | bring brought brought ~ along | person | thing food text person
weg|werfen wirfst wirft | weggeworfen | throw threw thrown ~ away | person | thing text garment
auf|räumen | aufgeräumt | tidy ~ up | person | room
aus|wählen | ausgewählt | choose chose chosen | person | thing garment text
ein|packen | eingepackt | pack | person | thing garment
vor|bereiten | vorbereitet | prepare | person | occasion work
malen | gemalt | paint | person | person animal building
zeichnen | gezeichnet | draw drew drawn | person | person animal building
füttern | gefüttert | feed fed fed | person | animal
fangen fängst fängt | gefangen | catch caught caught | person animal | animal
jagen | gejagt | chase | person animal | animal
retten | gerettet | rescue | person | person animal
beobachten | beobachtet | watch | person animal | person animal vehicle
fahren fährst fährt | gefahren | drive drove driven | person | car
planen | geplant | plan planned planned | person | occasion
lösen | gelöst | solve | person | problem
stehlen stiehlst stiehlt | gestohlen | steal stole stolen | person | thing garment vehicle
verstecken | versteckt | hide hid hidden | person | thing text
benutzen | benutzt | use | person | thing vehicle
""",
    "stative": """
sehen siehst sieht | gesehen | see saw seen | person animal | person animal thing vehicle building
hören | gehört | hear heard heard | person animal | person animal vehicle
lieben | geliebt | love | person | person animal
kennen | gekannt | know knew known | person | person place text
brauchen | gebraucht | need | person | thing garment vehicle text
verstehen | verstanden | understand understood understood | person | person idea text
vergessen vergisst vergisst | vergessen | forget forgot forgotten | person | person thing idea
verlieren | verloren | lose lost lost | person | thing text
""",
    "dative": """
helfen hilfst hilft | geholfen | help | person | person animal
danken | gedankt | thank | person | person
folgen | gefolgt sein | follow | person animal | person animal vehicle
antworten | geantwortet | answer | person | person
vertrauen | vertraut | trust | person | person
zu|hören | zugehört | listen + to | person | person
begegnen | begegnet sein | meet met met | person | person animal
gratulieren | gratuliert | congratulate | person | person
gehören | gehört | belong + to | thing text garment vehicle animal | person
""",
    "ditransitive": """
geben gibst gibt | gegeben | give gave given | person | thing text food drink
zeigen | gezeigt | show showed shown | person | thing text animal vehicle
schicken | geschickt | send sent sent | person | thing text
bringen | gebracht | bring brought brought | person | thing text food drink
leihen | geliehen | lend lent lent | person | thing text vehicle
erzählen | erzählt | tell told told | person | tale
""",
    # the same in German; English has "the rule to the child"
    "ditransitive-to": """
erklären | erklärt | explain | person | idea problem
vor|lesen liest liest | vorgelesen | read read read | person | text
zurück|geben gibst gibt | zurückgegeben | give gave given + back | person | thing text
""",
    "motion": """
gehen | gegangen sein | go went gone | person
fahren fährst fährt | gefahren sein | drive drove driven | person
laufen läufst läuft | gelaufen sein | run ran run | person animal
kommen | gekommen sein | come came come | person animal
reisen | gereist sein | travel travelled travelled | person
zurück|kehren | zurückgekehrt sein | return | person
""",
    "position": """
sitzen | gesessen | sit sat sat | person animal
stehen | gestanden | stand stood stood | person animal
liegen | gelegen | lie lay lain | person animal thing text
bleiben | geblieben sein | stay | person animal
""",
    "putting": """
legen | gelegt | lay laid laid | person | thing text garment
stellen | gestellt | put put put | person | thing
werfen wirfst wirft | geworfen | throw threw thrown | person | thing garment
""",
    "clause": """
sagen | gesagt | say said said | person
glauben | geglaubt | believe | person
hoffen | gehofft | hope | person
denken | gedacht | think thought thought | person
wissen weißt weiß | gewusst | know knew known | person
vergessen vergisst vergisst | vergessen | forget forgot forgotten | person
""",
    "question": """
fragen | gefragt | ask | person
""",
    "infinitive": """
versuchen | versucht | try | person animal
beginnen | begonnen | begin began begun | person animal
an|fangen fängst fängt | angefangen | start | person animal
beschließen | beschlossen | decide | person
versprechen versprichst verspricht | versprochen | promise | person
planen | geplant | plan planned planned | person
vergessen vergisst vergisst | vergessen | forget forgot forgotten | person
""",
}

# prepositional objects: (German preposition, case) -> rows
_GOVERNED: dict[tuple[str, Case], str] = {
    ("auf", "accusative"): """
warten | gewartet | wait + for | person animal | person vehicle
sich freuen | gefreut | look + forward to | person | occasion
""",
    ("an", "accusative"): """
denken | gedacht | think thought thought + of | person | person occasion work
sich erinnern | erinnert | remember | person | person occasion tale
""",
    ("über", "accusative"): """
lachen | gelacht | laugh + at | person | person tale animal
""",
    ("um", "accusative"): """
sich kümmern | gekümmert | take took taken + care of | person | person animal
""",
    ("an", "dative"): """
teil|nehmen nimmst nimmt | teilgenommen | take took taken + part in | person | occasion
""",
    ("von", "dative"): """
träumen | geträumt | dream + of | person | person animal occasion
""",
    ("mit", "dative"): """
sprechen sprichst spricht | gesprochen | talk + to | person | person
spielen | gespielt | play + with | person animal | person animal
streiten | gestritten | argue + with | person | person
an|fangen fängst fängt | angefangen | start | person | work
auf|hören | aufgehört | stop stopped stopped | person | work
""",
    ("vor", "dative"): """
weg|laufen läufst läuft | weggelaufen sein | run ran run + away from | person animal | person animal
""",
}


def _english_verb(text: str) -> EnglishVerb:
    splits = "~" in text
    forms, _, tail = text.partition("~" if splits else "+")
    base, *rest = forms.split()
    past, participle = rest or (regular_past(base), regular_past(base))
    return EnglishVerb(base, past, participle, tail.strip(), splits)


def _verb(frame: str, row: list[str], preposition: str = "", case: Case = "accusative") -> Verb:
    german, participle, english, subjects, *objects = row
    reflexive = german.startswith("sich ")
    infinitive, *finite = german.removeprefix("sich ").split()
    prefix, _, base = infinitive.rpartition("|")
    du, er = finite or regular_forms(base)
    return Verb(
        frame=frame,
        de=base,
        du=du,
        er=er,
        participle=participle.removesuffix(" sein"),
        auxiliary="sein" if participle.endswith(" sein") else "haben",
        prefix=prefix,
        reflexive=reflexive,
        en=_english_verb(english),
        subjects=tuple(subjects.split()),
        objects=tuple(objects[0].split()) if objects else (),
        preposition=preposition,
        case="dative" if frame == "dative" else case,
    )


VERBS: dict[str, tuple[Verb, ...]] = {
    **{frame: tuple(_verb(frame, row) for row in rows(table)) for frame, table in _VERBS.items()},
    "prepositional": tuple(
        _verb("prepositional", row, preposition, case)
        for (preposition, case), table in _GOVERNED.items()
        for row in rows(table)
    ),
}
BE = _verb(
    "predicate",
    rows("sein bist ist | gewesen sein | be was been | person animal text thing garment vehicle place occasion idea")[
        0
    ],
)
