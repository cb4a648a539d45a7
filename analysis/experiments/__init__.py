"""Translations trained from raw text to BLEU, as a recipe says.

run.py       a recipe (recipes/*.toml): runs it or goes on with it, into a ledger
report.py    ledgers -> tables
demo.py      recipes/demo.toml on the sentences of tatoeba/, in minutes
train.py     one training: text -> dsq-preprocess, dsq-train -> BLEU

data.py      the text of a training; its binary form
text.py      parallel text, labelled sentences, subwords
fairseq_run.py  fairseq's commands as processes, and what they log
recipe.py    a recipe read, multiplied out into runs, and costed
ledger.py    a row a run, grouped by seeds
"""
