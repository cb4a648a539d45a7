"""The share of GEMM FLOPs that dsq.convert quantises in the models people train: python -m analysis.coverage

Small configurations, so that it takes seconds; shares depend on the ratio of sequence to width, here 64 to 128.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

import dsq
from dsq.command.parser import OneLineParser, guarded
from dsq.command.table import table

WIDTH, LAYERS, HEADS, VOCABULARY, TOKENS = 128, 2, 4, 512, 64
Made = tuple[nn.Module, dict[str, Any]]  #: a model and its inputs


def _words() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, TOKENS))


def _values() -> torch.Tensor:
    return torch.randn(2, TOKENS, WIDTH)


def _transformers(model: str, **fields: Any) -> Callable[[], Made]:
    """A model of transformers by the name of its class."""

    def make() -> Made:
        import transformers

        kind = getattr(transformers, model)
        if kind.main_input_name == "pixel_values":
            return kind(kind.config_class(**fields)), {"pixel_values": torch.randn(2, 3, 64, 64)}
        ids = _words()
        return kind(kind.config_class(**fields)), {"input_ids": ids, "labels": ids}

    return make


class _OwnAttention(nn.Module):
    """A block as a plain loop's model writes it: it calls F.scaled_dot_product_attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.feed_forward(x + self.out(y))


class _WrittenAttention(nn.Module):
    """Attention's products written out, by dsq.functional.matmul where @ stood."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = dsq.functional.matmul(q, k.mT, self.qkv).softmax(-1)
        return x + self.out(dsq.functional.matmul(weights, v, self.qkv).transpose(1, 2).flatten(2))


class _NanoGPT(nn.Module):
    """Tables, blocks, and a head that is the table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(_OwnAttention() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _fairseq() -> Made:
    import_module("fairseq_plugin.shims")  # before fairseq, which does not load without
    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel, transformer_legacy

    words = Dictionary()
    for index in range(VOCABULARY - len(words)):
        words.add_symbol(str(index))
    sizes = {"layers": LAYERS, "embed_dim": WIDTH, "ffn_embed_dim": 4 * WIDTH, "attention_heads": HEADS}
    both = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    args = argparse.Namespace(share_decoder_input_output_embed=True, **both)
    transformer_legacy.transformer_iwslt_de_en(args)
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    batch = {"src_tokens": _words(), "src_lengths": torch.full((2,), TOKENS), "prev_output_tokens": _words()}
    return TransformerModel.build_model(args, task), batch


_SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
}
_TEXT = _SIZES | {"vocab_size": VOCABULARY}
MODELS: dict[str, Callable[[], Made]] = {
    "BERT": _transformers("BertForMaskedLM", **_TEXT),
    "RoBERTa": _transformers("RobertaForMaskedLM", **_TEXT),
    "DistilBERT": _transformers(
        "DistilBertForMaskedLM", dim=WIDTH, hidden_dim=4 * WIDTH, n_layers=LAYERS, n_heads=HEADS, vocab_size=VOCABULARY
    ),
    "GPT-2": _transformers("GPT2LMHeadModel", n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCABULARY),
    "OPT": _transformers("OPTForCausalLM", ffn_dim=4 * WIDTH, word_embed_proj_dim=WIDTH, **_TEXT),
    "Llama": _transformers("LlamaForCausalLM", num_key_value_heads=2, **_TEXT),
    "Mixtral": _transformers("MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4, **_TEXT),
    "Qwen2-MoE": _transformers(
        "Qwen2MoeForCausalLM",
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=WIDTH,
        num_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        **_TEXT,
    ),
    "T5": _transformers(
        "T5ForConditionalGeneration",
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=4 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    ),
    "ViT": _transformers("ViTForImageClassification", image_size=64, patch_size=8, num_labels=10, **_SIZES),
    "nn.TransformerEncoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True), LAYERS),
        {"src": _values()},
    ),
    "nn.Transformer": lambda: (
        nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, 4 * WIDTH, batch_first=True),
        {"src": _values(), "tgt": _values()},
    ),
    "nn.MultiheadAttention": lambda: (
        nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        dict.fromkeys(("query", "key", "value"), _values()),
    ),
    "own attention": lambda: (nn.Sequential(*(_OwnAttention() for _ in range(LAYERS))), {"input": _values()}),
    "written attention": lambda: (_WrittenAttention(), {"x": _values()}),
    "nanoGPT": lambda: (_NanoGPT(), {"ids": _words()}),
    "fairseq": _fairseq,
}


def shares(name: str, **options: Any) -> dict[str, Any]:
    """Forward and backward share of the model ``name``, and what was left; ``options`` of DSQConfig."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dsq.convert(model, dsq.DSQConfig(levels=dsq.parse_levels("[4,4,4,16]"), **options))
    found = dsq.report(model, **inputs)
    assert found.backward is not None
    left = sum(entry.parameters for entry in found.left)
    return {
        "model": name,
        "forward": found.forward.share,
        "backward": found.backward.share,
        "others": ", ".join(f"{op} {n / found.forward.total:.1%}" for op, n in found.forward.plain.items() if n),
        "uncalled": len(found.uncalled),
        "parameters left": left,
        "stash": (found.stash_bytes or 0) / (found.plain_stash_bytes or 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.coverage", description=__doc__)
    parser.add_argument("--attention", action="store_true", help="quantise attention's two products too")
    names = f"of {', '.join(MODELS)}; default: all"
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL", help=names)
    given = parser.parse_args(argv)

    def work() -> None:
        rows = [shares(name, attention=given.attention) for name in given.models or MODELS]
        columns = {"model": "", "forward": ".1%", "backward": ".1%", "others": "", "uncalled": ""}
        print(table(rows, columns | {"parameters left": "", "stash": ".0%"}, markdown=True))

    return guarded(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
