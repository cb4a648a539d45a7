"""Trainings from raw data to a result, one by one or as an experiment.

run.py        a recipe (recipes/*.toml): runs it or goes on with it, into a ledger
report.py     ledgers -> tables and pictures
demo.py       translate.py on the generated corpus, in minutes
translate.py  parallel text -> BLEU and costs
glue.py       labelled sentences -> accuracy

text/         parallel text, labelled sentences, subwords
training/     one training: dsq-preprocess, dsq-train and dsq-generate as processes, their logs, results and costs
plan/         a recipe read, multiplied out into runs, and costed
session/      the data and the folder of each run on disk, and the processes
ledger/       a row a run, grouped by seeds
"""
