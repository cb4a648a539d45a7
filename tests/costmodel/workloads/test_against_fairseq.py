"""The named fairseq workload against fairseq's own model, at its full size and small."""

import argparse
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dsq
from costmodel.model.methods import DSQ, Setup
from costmodel.workloads.named import load_shapes, load_workload
from costmodel.workloads.shapes import Head
from costmodel.workloads.transformer import build
from dsq.precision import Precision

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModel, transformer_legacy
from fairseq.modules import MultiheadAttention

from tests.costmodel.workloads.test_against_models import measured_stash, predicted_stash

SMALL = {"layers": 2, "embed_dim": 24, "ffn_embed_dim": 50, "attention_heads": 3}


def fairseq_model(source_types, target_types, **sizes):
    arguments = argparse.Namespace(share_decoder_input_output_embed=True)
    for side in ("encoder", "decoder"):
        for name, value in sizes.items():
            setattr(arguments, f"{side}_{name}", value)
    transformer_legacy.transformer_iwslt_de_en(arguments)
    task = argparse.Namespace(source_dictionary=types(source_types), target_dictionary=types(target_types))
    model = TransformerModel.build_model(arguments, task)
    for module in model.modules():
        if isinstance(module, MultiheadAttention):
            module.skip_embed_dim_check = True  # as fairseq_plugin does: attention calls its Linears
    return model


def types(count):
    dictionary = Dictionary()
    for index in range(count - len(dictionary)):
        dictionary.add_symbol(str(index))
    return dictionary


def small_workload():
    base = load_shapes("transformer_iwslt_de_en")
    sizes = {"layers": 2, "d": 24, "ffn": 50, "heads": 3}
    encoder = replace(base.encoder, **sizes, tables=(("embed_tokens", 100),))
    decoder = replace(base.decoder, **sizes, tables=(("embed_tokens", 90),))
    lengths = {"sequences": 3, "source_length": 11, "target_length": 7}
    head = Head("lm", 90, tied=True)
    return build(replace(base, encoder=encoder, decoder=decoder, head=head, **lengths)).converting_tied()


def batch():
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randint(4, 90, (3, length), generator=generator) for length in (11, 7))
    return source, torch.full((3,), 11), target


def test_parameters_of_the_full_model():
    model = fairseq_model(8848, 6632)
    real = sum(parameter.numel() for parameter in model.parameters())
    assert load_workload("transformer_iwslt_de_en").parameters == real


def test_products_of_a_small_one():
    model = fairseq_model(100, 90, **SMALL)
    with FlopCounterMode(display=False) as counter:
        model(*batch())[0].sum().backward()
    assert 2 * small_workload().macs == counter.get_total_flops()


@pytest.mark.parametrize("precision", ["[16,4,4,16]", "[2,2,2,16]"])
def test_stash_of_a_small_one(precision):
    model = dsq.convert(fairseq_model(100, 90, **SMALL), dsq.DSQConfig(levels=precision, tied=True))
    names = {"output_projection": "decoder.output_projection"}
    predicted = predicted_stash(small_workload(), Setup(DSQ, Precision.parse(precision)))
    assert {names.get(name, name): size for name, size in predicted.items()} == measured_stash(model, *batch())
