"""Trainings from raw data to a result: ``python -m analysis.experiments.demo|translate|glue``.

demo.py          translate.py on the generated corpus, in minutes
translate.py     parallel text -> BLEU and costs
glue.py          labelled sentences -> accuracy
fairseq_run.py   runs dsq-preprocess, dsq-train and dsq-generate, and reads their logs
"""
