"""fairseq 0.12.2 with DSQ: a --user-dir package. Importing it adds the --dsq-* flags to every task.

startup.py      lets fairseq be imported on Python >= 3.11
shims.py        other patches that fairseq needs on today's Python and torch
flags.py        the --dsq-* flags
tasks.py        adds DSQ to a task; writes dsq_history.json and dsq_workload.json
extension.py    adds DSQ to fairseq's tasks, parsers, checkpoints and trainer
state.py        converts a model, and saves and loads the state of the run in its checkpoints
checkpoints.py  writes checkpoints whole, and checks them
bleu_counts.py  reads the counts of BLEU in fairseq's checkpoints, as numbers alone
loss_in_chunks.py  computes cross-entropies without the logits of a whole batch
commands.py     dsq-preprocess, dsq-train, dsq-generate and other commands, and their error messages
averaging.py    dsq-average
"""

import importlib.util

if importlib.util.find_spec("fairseq"):  # without it, the commands name the package to install
    from fairseq_plugin import shims as shims
    from fairseq_plugin.extension import extend_fairseq

    extend_fairseq()
