"""A German-English parallel corpus from a synchronous grammar: the input of the main job where no data is at hand.

    python -m analysis.corpus OUT --sentences 20000 --seed 1

words.py: what a word is; nouns.py, verbs.py, particles.py: the lexicon; syntax.py: the sentence trees; phrases.py,
clauses.py, relatives.py, grammar.py: which trees there are and how often; german.py, english.py: a tree in words;
generate.py: the files. The same seed gives the same bytes anywhere.
"""
