"""A parallel German-English corpus generated from a small grammar: ``python -m analysis.corpus OUT``.

words.toml   the words
lexicon.py   reads them
grammar.py   what a clause consists of, and its words in both languages
generate.py  draws clauses by a seed and writes the files
"""
