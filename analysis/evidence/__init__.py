"""The suite of real tasks by which every default and every figure is judged: suite.toml; paper.toml, of DSQ's paper.

suite.py reads it; ledger.py runs what ../results/evidence.csv lacks, each run a process that trains a problem (of
problems.py, graphs.py or translations.py) by loop.py or fairseq's loop; steps.py times; comparison.py writes the page.
"""
