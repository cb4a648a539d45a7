"""Small models of transformers, and what the cost model makes of them."""

import json
import tempfile
from pathlib import Path
from typing import Any

from costmodel.model.operations import Workload
from costmodel.workloads.named import load_workload


def from_transformers(head: str, attention: str = "sdpa", **fields: Any) -> Any:
    """The model of transformers of the class ``head``: random weights, in training mode, without dropout and without a
    cache of keys and values, which is no part of training. ``fields``: of its configuration.
    """
    import transformers

    kind = getattr(transformers, head)
    config = kind.config_class(attn_implementation=attention, use_cache=False, **fields)
    for field in vars(config):
        if "drop" in field:
            setattr(config, field, 0.0)
    return kind(config).train()


def workload_of(model: Any, sequences: int, **lengths: int) -> Workload:
    """What the cost model makes of a model of transformers, by its config.json, with the attention that it runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(model.config.to_dict() | {"architectures": [type(model).__name__]}))
        fused = None if model.config._attn_implementation == "sdpa" else False
        return load_workload(str(path), sequences, fused=fused, **lengths)
