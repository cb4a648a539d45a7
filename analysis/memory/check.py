"""Bytes saved for the backward, and the allocator's peak, as dsq-cost predicts them and as running models have them.

python -m analysis.memory.check [--markdown]: small models of Hugging Face on this machine's CPU, no dropout, PyTorch's
fused attention; the peak covers forward and backward, parameters and optimiser aside.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import dsq
from costmodel.model.memory import Method, peak_memory, saved_bytes
from costmodel.model.planning import BF16, FP32
from costmodel.model.quantisation import Setup
from costmodel.workloads.named import load_workload
from dsq.command.table import table
from dsq.formats import BFP
from dsq.precision import Precision
from dsq.stash import measure

SEQUENCES, LENGTH, WORDS = 4, 128, 1000
#: name -> configuration class of transformers, and its fields
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": LENGTH, "activation_function": "gelu"}),
    "llama": (
        "Llama",
        {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 352},
    ),
    "bert": (
        "Bert",
        {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512},
    ),
    "opt": (
        "OPT",
        {
            **{"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 512},
            **{"word_embed_proj_dim": 128, "activation_function": "relu"},
        },
    ),
}
HEADS = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertForMaskedLM", "opt": "OPTForCausalLM"}
LEVEL = Precision(16, 4, 4, 16)
SETUPS = {"fp32": FP32, "bf16": BF16, f"dsq {LEVEL}": Setup(BFP(32), LEVEL)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="as a Markdown table")
    records = [compare(name, method) for name in MODELS for method in SETUPS]
    shown = {"model": "", "method": "", "saved_MB": ".2f", "predicted_MB": ".2f", "off": "+.1%"}
    shown |= {"peak_MB": ".2f", "predicted_peak_MB": ".2f", "peak_off": "+.1%"}
    print(table(records, shown, markdown=parser.parse_args().markdown))
    for column in ("off", "peak_off"):
        errors = sorted(abs(record[column]) for record in records)
        print(f"{column}: median {median(errors):.1%}, worst {errors[-1]:.1%}")


def compare(name: str, method: str) -> dict[str, Any]:
    """One model, one method: what is predicted and what is measured, bytes in MB."""
    model, config = build(name)
    setup = SETUPS[method]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config.to_dict() | {"architectures": [HEADS[name]]}))
        encoder = name == "bert"
        workload = load_workload(
            str(path), SEQUENCES, source_length=LENGTH if encoder else None, target_length=None if encoder else LENGTH
        ).fusing_attention()
    if method != "fp32":
        model = model.bfloat16()
    if method.startswith("dsq"):
        model = dsq.convert(model, dsq.DSQConfig(levels=(LEVEL,)))
    ids = torch.randint(WORDS, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    saved = measure(lambda: model(input_ids=ids, labels=ids).loss).nbytes
    peak = measure(lambda: model(input_ids=ids, labels=ids).loss, backward=True).peak_bytes
    memory = peak_memory(workload, Method(method, setup))
    predicted = saved_bytes(workload, setup)
    state = memory.categories["parameters"] + memory.categories["optimiser"]
    # a model cast to bfloat16 has bfloat16 gradients, not the fp32 ones of mixed precision
    gradients = memory.categories["gradients"] * (1 if method == "fp32" else 0.5)
    above = memory.peak - state - memory.categories["gradients"] + gradients
    return {
        **{"model": name, "method": method, "saved_MB": saved / 1e6, "predicted_MB": predicted / 1e6},
        **{"off": predicted / saved - 1, "peak_MB": peak / 1e6, "predicted_peak_MB": above / 1e6},
        "peak_off": above / peak - 1,
    }


def build(name: str) -> tuple[nn.Module, Any]:
    """The model with its masked or causal language model's head, and its configuration; dropout off."""
    import transformers

    kind, fields = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(vocab_size=WORDS, attn_implementation="sdpa", **fields)
    for field in vars(config):
        if "drop" in field or field.endswith("pdrop"):
            setattr(config, field, 0.0)
    config.use_cache = False  # a cache of keys and values is no part of training
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, HEADS[name])(config)
    return model, config


if __name__ == "__main__":
    main()
