"""A user directory of fairseq: criteria run under the setting that the environment names (problems.py sets it)."""

import json
import os
from typing import Any

from fairseq.criterions import FairseqCriterion
from torch import nn

from analysis.evidence.loop import apply_policies, autocast
from analysis.evidence.suite import Setting

SETTING = Setting(**json.loads(os.environ["DSQ_EVIDENCE_SETTING"]))
_attached = set[int]()


def _call(criterion: FairseqCriterion, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if SETTING.policies and id(model) not in _attached:
        apply_policies(model, SETTING)
        _attached.add(id(model))
    with autocast(SETTING):
        return nn.Module.__call__(criterion, model, *args, **kwargs)


FairseqCriterion.__call__ = _call
