"""The suite of real tasks by which every default and every figure is judged.

suite.toml    settings, tasks and tiers; suite.py reads them
paper.toml    the same of DSQ's paper, at its own sizes
__main__.py   the command: run, time, table, one
ledger.py     the ledger (../results/evidence.csv), and the runs that it lacks, each a process
steps.py      what a step takes under each setting, in turns (../results/steps.csv)
loop.py       PyTorch's loop, under one setting
problems.py   what it trains: a language model, sentences, a pretrained encoder, images
translations.py  what fairseq's loop trains
graphs.py     GCN and GAT on citation graphs
comparison.py the ledger -> docs/evidence.md: differences to fp32 of the same seed, with their intervals
"""
