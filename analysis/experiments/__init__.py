"""Trainings from raw data to a result, one by one or as an experiment.

run.py           a recipe (recipes/*.toml): runs it or goes on with it, into a ledger
report.py        ledgers -> tables and pictures
demo.py          translate.py on the generated corpus, in minutes
translate.py     parallel text -> BLEU and costs
glue.py          labelled sentences -> accuracy
fairseq_run.py   runs dsq-preprocess, dsq-train and dsq-generate, and reads their logs

experiment.py reads a recipe, plan.py multiplies it out, plan_costs.py costs it, data_folder.py and run_folder.py keep
what is on disk, engines.py starts processes, ledger.py has a row a run, configurations.py groups rows by their seeds.
"""
