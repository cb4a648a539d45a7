"""A Hugging Face config.json as a transformer's shapes: one reader, and what families leave unsaid (families.toml).

Of any other model `dsq-cost trace` writes a workload file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsq.command import read_toml
from dsq.costmodel.fields import Fields
from dsq.costmodel.names import suggestion
from dsq.costmodel.workloads.shapes import Head, MixtureOfExperts, Patches, Stack, Transformer

DEFAULT_LENGTH, LONGEST = 512, 2048
_DATA = read_toml(Path(__file__).with_name("families.toml"))
_FIELDS: dict[str, list[str]] = _DATA["fields"]
#: class names that end as a bare model's does, and are others
_NOT_BARE = ("HeadModel", "HeadsModel", "EncoderModel")


@dataclass(frozen=True)
class Family:
    """Facts of one model_type that its configs do not state."""

    kind: str  #: a key of `heads`
    stack: dict[str, Any] = field(default_factory=dict)  #: fields of Stack
    #: any of "words", "positions", "types" -> its rows beside those that the config counts
    tables: Mapping[str, int] = field(default_factory=lambda: {"words": 0})
    tied: bool = True  #: if the config does not say
    head: Mapping[str, Any] = field(default_factory=dict)  #: kind of head -> fields of Head
    activation: str = "gelu"  #: if the config does not say
    fuses: bool = True  #: see Transformer
    ffn_parts: int = 1  #: layers whose outputs the config's width of an MLP counts


def _families(tables: Mapping[str, Any]) -> dict[str, Family]:
    families: dict[str, Family] = {}
    for name, table in tables.items():
        base = families[table["like"]] if "like" in table else Family(table["kind"])
        fields = {field: value for field, value in table.items() if field != "like"}
        families[name] = replace(base, **fields | {"stack": base.stack | table.get("stack", {})})
    return families


FAMILIES = _families(_DATA["families"])


def transformer_of(data: Any, where: str, name: str = "") -> Transformer:
    """Return the transformer that a config.json describes. Raises ValueError that names the file and the field."""
    if not isinstance(data, dict):
        raise ValueError(f"config {where} must be a JSON object")
    config = _Config(data, f"config {where}: field ")
    kind = config.get("model_type", str)
    if kind not in FAMILIES:
        hint = f"{suggestion(kind, FAMILIES)}described are {', '.join(FAMILIES)}; of others write a workload file: "
        raise ValueError(f"config {where}: model_type {kind!r} is not described; {hint}dsq-cost trace {where} FILE")
    model = config.transformer(FAMILIES[kind], name or config.get("_name_or_path", str, "") or kind)
    return replace(model, source=where)


class _Config(Fields):
    """The JSON, read field by field. Every method raises ValueError for a bad field."""

    def transformer(self, family: Family, name: str) -> Transformer:
        side = "encoder" if family.kind in ("encoder", "image") else "decoder"
        self.refuse(
            self.get("add_cross_attention", bool, False),
            "add_cross_attention: a decoder without an encoder is described; write a workload file: dsq-cost trace "
            "CONFIG FILE",
        )
        stack = self.stack(side, family)
        positions = 0 if family.kind in ("both", "image") else self.size(*_FIELDS["positions"], default=0)
        length = min(LONGEST if family.kind == "decoder" else DEFAULT_LENGTH, positions or LONGEST)
        sizes: dict[str, Any] = {
            side: stack,
            "weight_format": self.weight_format(),
            "positions": positions,
            "fuses": family.fuses,
            "source_length": stack.patches.count + 1 if stack.patches else length,
            "target_length": length,
        }
        if family.kind == "both":
            sizes["encoder"] = self.stack("encoder", family)
            layers = self.size("num_decoder_layers", "num_layers")
            sizes["decoder"] = self.stack("decoder", family, layers=layers, cross=True, tables=(("words (shared)", 0),))
        return Transformer(name, self.head(family), **sizes)

    def weight_format(self) -> str:
        """Return the format in which the weights are stored; empty: 16 or 32 bits."""
        table = self.get("quantization_config", dict, {})
        bits = 4 if table.get("load_in_4bit") else table.get("bits", 8)
        return f"{bits}-bit ({table.get('quant_method', 'unnamed')})" if table else ""

    def stack(self, side: str, family: Family, **overrides: Any) -> Stack:
        """Return a stack, with the config's sizes, dropout and activation."""
        sizes = {name: self.size(*_FIELDS[name]) for name in ("layers", "d", "heads")}
        read: dict[str, Any] = {"causal": side == "decoder", "heads_copied": True, **family.stack, **sizes}
        defaults = {"ffn": 4 * read["d"], "kv_heads": 0, "head_dim": 0}
        read |= {name: self.size(*_FIELDS[name], default=read.get(name, least)) for name, least in defaults.items()}
        read["ffn"] //= family.ffn_parts
        for flag, fields in _DATA["flags"].items():
            if self.find(flag) is not None:
                read |= dict.fromkeys(fields, self.get(flag, bool))
        for name in ("dropout", "attention_dropout"):
            rates = [self.number(one, least=0) for one in _FIELDS[name] if self.find(one) is not None]
            read[name] = any(rates) if rates else read.get(name, False)
        act = next(filter(None, map(self.find, _FIELDS["activation"])), family.activation)
        if family.kind == "both":
            act = self.get("feed_forward_proj", str, family.activation)
            read["gated"] = act.startswith("gated")
        types = {"types": 2}  # where the config does not say
        read |= {
            "activation": _DATA["activations"].get(str(act), "activation"),
            "position_bias": self.size("relative_attention_num_buckets", default=read.get("position_bias", 0)),
            "tables": tuple(
                (table, self.size(*_FIELDS[table], default=types.get(table)) + surplus)
                for table, surplus in family.tables.items()
            ),
            **self.sliding(side),
            **self.experts(read["ffn"]),
            **(self.pictures(read["d"]) if family.kind == "image" else {}),
        }
        self.refuse(
            self.size("word_embed_proj_dim", default=read["d"]) != read["d"],
            f"word_embed_proj_dim must be hidden_size ({read['d']})",
        )
        return Stack(side, **read | overrides)

    def head(self, family: Family) -> Head:
        kinds, classes = _DATA["heads"][family.kind], self.find("architectures") or [_DATA["bare"][family.kind]]
        self.refuse(
            not isinstance(classes, list) or not isinstance(classes[0], str),
            f"architectures must be a list of names, not {classes!r}",
        )
        end = next((end for end in kinds if classes[0].endswith(end)), "")
        self.refuse(
            not end or (end == "Model" and classes[0].endswith(_NOT_BARE)),
            f"architectures: classes that end in {', '.join(kinds)} are described, not {classes[0]!r}",
        )
        read: dict[str, Any] = kinds[end] | family.head.get(kinds[end]["kind"], {})
        if read["kind"] == "classes":
            labels = self.find("id2label")
            count = len(labels) if isinstance(labels, dict) else 0
            read["outputs"] = count or self.whole("num_labels", 2)
        if read["kind"] == "lm":
            read |= {"outputs": self.whole("vocab_size"), "tied": self.get("tie_word_embeddings", bool, family.tied)}
        return Head(**read)

    def pictures(self, d: int) -> dict[str, Any]:
        """Return the patches of a picture and a class token."""
        image, size = self.size("image_size", default=224), self.size("patch_size", default=16)
        patches = Patches(self.size("num_channels", default=3), size, (image // size) ** 2)
        return {"patches": patches, "tables": (("positions", patches.count + 1),), "extra_parameters": d}

    def sliding(self, side: str) -> dict[str, int]:
        """Return the window of all layers but each n-th."""
        if not self.find("sliding_window") or side == "encoder" or not self.get("use_sliding_window", bool, True):
            return {}
        kinds = self.find("layer_types") or []
        every = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
        periodic = [
            "full_attention" if every and index % every == 0 else "sliding_attention"
            for index in range(1, len(kinds) + 1)
        ]
        self.refuse(kinds != periodic, "layer_types: each n-th layer may see all keys, no others")
        return {"window": self.size("sliding_window")} | ({"full_every": every} if kinds else {})

    def experts(self, ffn: int) -> dict[str, MixtureOfExperts]:
        count = self.size("num_local_experts", "num_experts", default=0)
        if not count:
            return {}
        self.refuse(
            self.find("mlp_only_layers") or self.size("decoder_sparse_step", default=1) > 1,
            "mlp_only_layers: experts in every layer are described",
        )
        per_token, width = self.size("num_experts_per_tok"), self.size("moe_intermediate_size", default=ffn)
        return {"experts": MixtureOfExperts(count, per_token, width)}

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the first of these fields that is there, a positive whole number."""
        return self.whole(next((name for name in names if self.find(name) is not None), names[0]), default)
