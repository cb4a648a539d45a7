"""How a Hugging Face configuration is read by its family's entry: a function for each kind of model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from costmodel.workloads.config_json import ConfigJson
from costmodel.workloads.shapes import Head, Stack, Transformer

DEFAULT_LENGTH, LONGEST = 512, 2048
Fields = dict[str, Any]
Reader = Callable[[ConfigJson], Any]

#: fields of a config that switch dropout on; a family without one has none
_DROPOUT = ("hidden_dropout_prob", "dropout", "resid_pdrop", "dropout_rate", "hidden_dropout", "resid_dropout")
_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
_ACTIVATION = ("hidden_act", "activation_function", "activation")


@dataclass(frozen=True)
class Family:
    """How to read one model_type."""

    kind: Callable[[ConfigJson, "Family"], Transformer]
    stack: Fields  #: fields of Stack
    tables: Fields = field(default_factory=dict)  #: name of an embedding -> its rows
    decoder: Fields = field(default_factory=dict)  #: what an encoder-decoder's decoder has otherwise
    decoder_tables: Fields = field(default_factory=dict)
    tied: Any = True  #: where the config does not say
    head: Fields = field(default_factory=dict)  #: fields of Head, of a language model
    positions: Reader = lambda config: config.size("max_position_embeddings", default=LONGEST)


def _value(config: ConfigJson, value: Any) -> Any:
    return value(config) if callable(value) else value


def read_fields(config: ConfigJson, fields: Fields) -> Fields:
    return {name: _value(config, value) for name, value in fields.items()}


def _stack(config: ConfigJson, name: str, fields: Fields, tables: Fields) -> Stack:
    """A stack, its tables as wide as the model unless it projects them, with the config's dropout and activation."""
    own = read_fields(config, fields)
    width = own.get("embedding_width") or own["d"]
    own["embedding_width"] = 0 if width == own["d"] else width
    rows = tuple((table, count, width) for table, count in read_fields(config, tables).items())
    hidden, attention = (
        any(float(config.data.get(field) or 0) > 0 for field in fields) for fields in (_DROPOUT, _ATTENTION_DROPOUT)
    )
    act = next((config.data[field] for field in _ACTIVATION if field in config.data), "")
    read: Fields = {"dropout": hidden, "attention_dropout": attention, "causal": name == "decoder", "tables": rows}
    read |= {"heads_copied": True}
    read["activation"] = "relu" if act == "relu" else "activation"
    return Stack(name, **read | own)


def _name(config: ConfigJson) -> str:
    return config.text("_name_or_path") or config.text("model_type")


def encoder_only(config: ConfigJson, family: Family) -> Transformer:
    """BERT's kin with a masked LM, a classifier behind a dense layer, or a bare pooler (or nothing) on top."""
    own = read_fields(config, family.head)
    pooler = own.pop("pooler", True)
    top = config.head("ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "Model")
    head = Head("none", dense=pooler)
    if top in ("ForMaskedLM", "ForPreTraining"):
        tied = config.flag("tie_word_embeddings", True)
        lm: Fields = {"outputs": config.size("vocab_size"), "bias": True, "tied": tied, "dense": True, "norm": True}
        head = Head("lm", **lm | own)
    elif top == "ForSequenceClassification":
        head = Head("classes", config.classes, bias=True, dense=True)
    length = min(DEFAULT_LENGTH, config.size("max_position_embeddings"))
    encoder = _stack(config, "encoder", family.stack, family.tables)
    return Transformer(_name(config), head, encoder=encoder, source_length=length, source=config.where)


def decoder_only(config: ConfigJson, family: Family) -> Transformer:
    tied = config.flag("tie_word_embeddings", _value(config, family.tied))
    head = Head("lm", config.size("vocab_size"), tied=tied, upcasts=True, **read_fields(config, family.head))
    top = config.head("ForCausalLM", "LMHeadModel", "ForSequenceClassification", "Model")
    if top == "ForSequenceClassification":
        head = Head("classes", config.classes)
    elif top == "Model":
        head = Head("none")
    decoder, length = _stack(config, "decoder", family.stack, family.tables), min(LONGEST, family.positions(config))
    return Transformer(_name(config), head, decoder=decoder, target_length=length, source=config.where)


def encoder_decoder(config: ConfigJson, family: Family) -> Transformer:
    head = Head("lm", config.size("vocab_size"), tied=config.flag("tie_word_embeddings", True))
    if config.head("ForConditionalGeneration", "LMHeadModel", "MTModel", "Model") == "Model":
        head = Head("none")
    encoder = _stack(config, "encoder", family.stack, family.tables)
    decoder = _stack(config, "decoder", family.stack | family.decoder, family.decoder_tables)
    length = min(DEFAULT_LENGTH, family.positions(config))
    source = encoder.convolutions[-1].positions if encoder.convolutions else length
    stacks: Fields = {"encoder": encoder, "decoder": decoder, "source_length": source, "target_length": length}
    return Transformer(_name(config), head, source=config.where, **stacks)


def image_encoder(config: ConfigJson, family: Family) -> Transformer:
    """Patches of a picture and a class token."""
    encoder = _stack(config, "encoder", family.stack, family.tables)
    head = Head("none", dense=_value(config, family.head.get("pooler", True)))
    if config.head("ForImageClassification", "Model") == "ForImageClassification":
        head = Head("classes", config.classes, bias=True)
    length = encoder.convolutions[0].positions + 1
    return Transformer(_name(config), head, encoder=encoder, source_length=length, source=config.where)
