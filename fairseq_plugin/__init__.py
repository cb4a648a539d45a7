"""fairseq 0.12.2 with DSQ: a --user-dir package. Importing it adds the --dsq-* flags to every task.

startup.py      lets fairseq be imported on Python >= 3.11
shims.py        what else fairseq needs on today's Python and torch
flags.py        the --dsq-* flags
tasks.py        what DSQ adds to a task; writes dsq_history.json and dsq_workload.json
extension.py    where it enters fairseq: tasks, parsers, checkpoints, trainer
state.py        DSQ in a model: conversion, the run's state in checkpoints, loading
checkpoints.py  writes checkpoints whole, and checks them
commands.py     dsq-preprocess, dsq-train, dsq-generate and the rest, and what users are told
averaging.py    dsq-average
"""

import importlib.util

if importlib.util.find_spec("fairseq"):  # without it, the commands say what to install
    from fairseq_plugin import shims as shims
    from fairseq_plugin.extension import extend_fairseq

    extend_fairseq()
