"""A Hugging Face config.json as a transformer's shapes: one reader, and what families leave unsaid (families.toml).

Of any other model `dsq-cost trace` writes a workload file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from dsq.command import read_toml
from dsq.costmodel.names import suggestion
from dsq.costmodel.workloads.shapes import Head, MixtureOfExperts, Patches, Stack, Transformer

T = TypeVar("T")
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
    tables: Sequence[str] = ("words",)  #: any of "words", "positions", "types"
    tied: bool = True  #: if the config does not say
    head: Mapping[str, Any] = field(default_factory=dict)  #: fields of Head
    activation: str = "gelu"  #: if the config does not say
    fuses: bool = True  #: see Transformer
    more_positions: int = 0  #: rows of the table that the config does not count
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
    config = _Config({key: value for key, value in data.items() if value is not None}, where)
    kind = config.typed("model_type", "")
    if not kind:
        raise ValueError(f"config {where}: field model_type is missing")
    if kind not in FAMILIES:
        hint = f"{suggestion(kind, FAMILIES)}described are {', '.join(FAMILIES)}; of others write a workload file: "
        raise ValueError(f"config {where}: model_type {kind!r} is not described; {hint}dsq-cost trace {where} FILE")
    return config.transformer(FAMILIES[kind], name or config.typed("_name_or_path", "") or kind)


@dataclass(frozen=True)
class _Config:
    """The JSON, read field by field. Every method raises ValueError for a bad field."""

    data: dict[str, Any]  #: without its nulls: a null field is an absent one
    where: str

    def transformer(self, family: Family, name: str) -> Transformer:
        side = "encoder" if family.kind in ("encoder", "image") else "decoder"
        self.refuse(
            self.typed("add_cross_attention", False),
            "add_cross_attention: a decoder without an encoder is described; write a workload file: dsq-cost trace "
            f"{self.where} FILE",
        )
        for rotary in ("rope_parameters", "rope_scaling"):
            self.typed(rotary, dict[str, Any]())
        stack = self.stack(side, family)
        sizes: dict[str, Any] = {"source": self.where, "weight_format": self.weight_format(), side: stack}
        positions = 0 if family.kind in ("both", "image") else self.size(*_FIELDS["positions"], default=0)
        length = min(LONGEST if family.kind == "decoder" else DEFAULT_LENGTH, positions or LONGEST)
        sizes |= {"positions": positions, "fuses": family.fuses}
        sizes |= {"source_length": stack.patches.count + 1 if stack.patches else length, "target_length": length}
        if family.kind == "both":
            sizes["encoder"] = self.stack("encoder", family)
            layers = self.size("num_decoder_layers", "num_layers")
            sizes["decoder"] = self.stack("decoder", family, layers=layers, cross=True, tables=(("words (shared)", 0),))
        return Transformer(name, self.head(family), **sizes)

    def weight_format(self) -> str:
        """Return the format in which the weights are stored; empty: 16 or 32 bits."""
        table: dict[str, Any] = self.typed("quantization_config", {})
        bits = 4 if table.get("load_in_4bit") else table.get("bits", 8)
        return f"{bits}-bit ({table.get('quant_method', 'unnamed')})" if table else ""

    def stack(self, side: str, family: Family, **overrides: Any) -> Stack:
        """Return a stack, with the config's sizes, dropout and activation."""
        read: dict[str, Any] = {"causal": side == "decoder", "heads_copied": True} | dict(family.stack)
        read |= {name: self.size(*_FIELDS[name]) for name in ("layers", "d", "heads")}
        defaults = {"ffn": 4 * read["d"], "kv_heads": 0, "head_dim": 0}
        read |= {name: self.size(*_FIELDS[name], default=read.get(name, least)) for name, least in defaults.items()}
        read["ffn"] //= family.ffn_parts
        for flag, fields in _DATA["flags"].items():
            if flag in self.data:
                read |= dict.fromkeys(fields, self.typed(flag, False))
        for name in ("dropout", "attention_dropout"):
            rates = {one: self.data[one] for one in _FIELDS[name] if one in self.data}
            for one, rate in rates.items():
                self.refuse(type(rate) not in (int, float), f"{one} must be a number, not {rate!r}")
            read[name] = any(rate > 0 for rate in rates.values()) if rates else read.get(name, False)
        act = next((str(self.data[one]) for one in _FIELDS["activation"] if one in self.data), family.activation)
        if family.kind == "both":
            act = self.typed("feed_forward_proj", family.activation)
            read["gated"], act = act.startswith("gated"), "gelu_new" if act == "gated-gelu" else act
        read["activation"] = _DATA["activations"].get(act, "activation")
        read["position_bias"] = self.size("relative_attention_num_buckets", default=read.get("position_bias", 0))
        read |= self.sliding(side) | self.experts(read["ffn"])
        if family.kind == "image":
            read |= self.pictures(read["d"])
        else:
            read["tables"] = tuple((table, self.rows(table, family)) for table in family.tables)
        self.refuse(
            self.size("word_embed_proj_dim", default=read["d"]) != read["d"],
            f"word_embed_proj_dim must be hidden_size ({read['d']})",
        )
        return Stack(side, **read | overrides)

    def head(self, family: Family) -> Head:
        options = dict(family.head)
        pooler = options.pop("pooler", True)
        kinds, classes = _DATA["heads"][family.kind], self.data.get("architectures") or [""]
        self.refuse(
            not isinstance(classes, list) or not isinstance(classes[0], str),
            f"architectures must be a list of names, not {classes!r}",
        )
        end = next((end for end in kinds if classes[0].endswith(end)), "")
        self.refuse(
            classes[0] and (not end or (end == "Model" and classes[0].endswith(_NOT_BARE))),
            f"architectures: classes that end in {', '.join(kinds)} are described, not {classes[0]!r}",
        )
        lm = family.kind in ("decoder", "both")
        kind = kinds[end] if end else "lm" if lm else "none"
        if kind == "none":
            return Head("none", dense=pooler and not lm)
        if kind == "classes":
            labels = self.data.get("id2label")
            count = len(labels) if isinstance(labels, dict) and labels else self.size("num_labels", default=2)
            return Head("classes", count, bias=not lm, dense=family.kind == "encoder")
        options |= {"outputs": self.size("vocab_size"), "tied": self.typed("tie_word_embeddings", family.tied)}
        masked = {"bias": True, "dense": True, "norm": True} if family.kind == "encoder" else {}
        loss = "loss of fp32" if family.kind == "decoder" else "loss"
        return Head("lm", **{"loss": loss} | masked | options)

    def rows(self, table: str, family: Family) -> int:
        if table == "positions":
            return self.size(*_FIELDS["positions"]) + family.more_positions
        return self.size("vocab_size") if table == "words" else self.size("type_vocab_size", default=2)

    def pictures(self, d: int) -> dict[str, Any]:
        """Return the patches of a picture and a class token."""
        image, size = self.size("image_size", default=224), self.size("patch_size", default=16)
        patches = Patches(self.size("num_channels", default=3), size, (image // size) ** 2)
        return {"patches": patches, "tables": (("positions", patches.count + 1),), "extra_parameters": d}

    def sliding(self, side: str) -> dict[str, int]:
        """Return the window of all layers but each n-th."""
        if "sliding_window" not in self.data or side == "encoder" or not self.typed("use_sliding_window", True):
            return {}
        kinds = self.data.get("layer_types") or []
        full = [index for index, kind in enumerate(kinds, 1) if kind == "full_attention"]
        every = full[0] if full else 0
        periodic = [index for index in range(1, len(kinds) + 1) if every and index % every == 0]
        self.refuse(
            set(kinds) - {"full_attention", "sliding_attention"} or full != periodic,
            "layer_types: each n-th layer may see all keys, no others",
        )
        return {"window": self.size("sliding_window")} | ({"full_every": every} if kinds else {})

    def experts(self, ffn: int) -> dict[str, MixtureOfExperts]:
        names = ("num_local_experts", "num_experts")
        if not any(name in self.data for name in names):
            return {}
        self.refuse(
            self.data.get("mlp_only_layers") or self.size("decoder_sparse_step", default=1) > 1,
            "mlp_only_layers: experts in every layer are described",
        )
        per_token, width = self.size("num_experts_per_tok"), self.size("moe_intermediate_size", default=ffn)
        return {"experts": MixtureOfExperts(self.size(*names), per_token, width)}

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the first of these fields that is there, a positive whole number."""
        name = next((name for name in names if name in self.data), "")
        if not name and default is None:
            raise self.fault(f"{names[0]} is missing")
        value: Any = self.data.get(name, default)
        if type(value) is not int or (name and value < 1):
            raise self.fault(f"{name} must be a positive whole number, not {value!r}")
        return int(value)

    def typed(self, name: str, default: T) -> T:
        """Return a field of the default's type."""
        value: T = self.data.get(name, default)
        if type(value) is not type(default):
            accepted = {dict: "a table", bool: "true or false", str: "text"}[type(default)]
            raise self.fault(f"{name} must be {accepted}, not {value!r}")
        return value

    def refuse(self, wrong: object, text: str) -> None:
        if wrong:
            raise self.fault(text)

    def fault(self, text: str) -> ValueError:
        return ValueError(f"config {self.where}: field {text}")
