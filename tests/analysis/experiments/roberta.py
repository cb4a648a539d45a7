"""A pretrained RoBERTa of fairseq's, in miniature."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch


def write_roberta(folder: Path, width: int) -> Path:
    """One layer of random weights, under the names of the published checkpoint, which fairseq brings up to date."""
    from fairseq.data import Dictionary
    from fairseq.models.roberta.model import RobertaModel

    folder.mkdir()
    letters = 'abc"0123456789\u0120'  # GPT-2 writes a space as the last
    (folder / "encoder.json").write_text(json.dumps({letter: n for n, letter in enumerate(letters)}))
    (folder / "vocab.bpe").write_text("#version: 0.2\n\n")
    (folder / "dict.txt").write_text("".join(f"{n} 1\n" for n in range(len(letters))))
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    dictionary.add_symbol("<mask>")
    sizes = {"encoder_layers": 1, "encoder_embed_dim": width, "encoder_ffn_embed_dim": width}
    options = Namespace(arch="roberta", task="masked_lm", max_positions=512, encoder_attention_heads=2, **sizes)
    model = RobertaModel.build_model(options, SimpleNamespace(source_dictionary=dictionary))
    names = {name: name.replace("encoder.", "decoder.", 1) for name in model.state_dict()}
    old = {name: new.replace("layernorm_embedding", "emb_layer_norm") for name, new in names.items()}
    ended = {"criterion_name": "MaskedLmLoss", "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}
    state = {
        "args": options,
        "model": {old[name]: tensor for name, tensor in model.state_dict().items()},
        "optimizer_history": [{**ended, "num_updates": 500_000}],
        "extra_state": {"train_iterator": {"epoch": 1}},
        "last_optimizer_state": None,
    }
    torch.save(state, folder / "model.pt")
    return folder
