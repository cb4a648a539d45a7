"""What the cost model makes of a model of transformers."""

import json
import tempfile
from pathlib import Path
from typing import Any

from costmodel.model.operations import Workload
from costmodel.workloads.named import load_workload


def workload_of(model: Any, sequences: int, **lengths: int) -> Workload:
    """What the cost model makes of a model of transformers, by its config.json, with the attention that it runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(model.config.to_dict() | {"architectures": [type(model).__name__]}))
        fused = None if model.config._attn_implementation == "sdpa" else False
        return load_workload(str(path), sequences, fused=fused, **lengths)
