"""fairseq 0.12.2 with DSQ: a --user-dir package. Importing it adds the --dsq-* flags to every task.

startup.py  lets fairseq be imported on Python >= 3.11
shims.py    what else fairseq needs on today's Python and torch
flags.py    the --dsq-* flags
tasks.py    the hooks into fairseq's tasks
model.py    conversion of a model, loading of checkpoints
state.py    what a checkpoint carries of a run
stash.py    measures the stash
history.py  writes dsq_history.json
commands.py dsq-preprocess, dsq-train, dsq-generate
"""

import importlib.util

if importlib.util.find_spec("fairseq"):  # without it, the commands say what to install
    from fairseq_plugin import shims as shims
    from fairseq_plugin.tasks import extend_fairseq

    extend_fairseq()
