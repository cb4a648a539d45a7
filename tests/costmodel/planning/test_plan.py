"""A plan's answers agree with sums by hand, with published memory, and with one another."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsq import costmodel
from dsq.costmodel.cli.main import main
from dsq.costmodel.hardware.hardware import load_hardware
from dsq.costmodel.model.entries import Category
from dsq.costmodel.model.memory import peak_memory, state
from dsq.costmodel.model.methods import AUTOCAST, BF16, DSQ, FP32, Method, Setup, whole_stash
from dsq.costmodel.planning.plan import NF4_BITS
from dsq.costmodel.planning.step import launching_seconds, sent_inside, sharded_memory, sharded_step, step_time
from dsq.costmodel.workloads.config_json import transformer_of
from dsq.costmodel.workloads.named import AskedStep, load_shapes, load_workload
from dsq.costmodel.workloads.shapes import MixtureOfExperts
from dsq.costmodel.workloads.transformer import Shard, build, stages
from dsq.precision import Precision
from tests.costmodel.workloads.models import small_gpt2

H100 = load_hardware("h100")
OPT = AskedStep("opt_1.3b", tokens=256)


def rows(plan):
    return {row.method.name: row for row in plan.rows}


def test_a_config_json_that_changed_is_read_again(tmp_path):
    two, four = (costmodel.plan(small_gpt2(tmp_path, n_layer=it), "h100").workload.parameters for it in (2, 4))
    assert four - two == 2 * (12 * 64 * 64 + 13 * 64)


def test_images_are_counted_where_the_input_is_images():
    plan = costmodel.plan("vit-base", "rtx-4090", sequences=64)
    best, most = plan.best, plan.largest_batch
    assert f"has {most.size:,} images ({most.method}). A step of 64 images takes" in plan.answer
    assert f", {64 / best.step.launched:,.0f} images/s, " in plan.answer


def test_what_does_not_fit_is_told_the_least_change():
    plan = costmodel.plan("llama-3-8b", "rtx-3090", tokens=512, devices=1, fit=13e9, lora=8)
    assert not plan.best.fits
    assert "llama-3-8b with LoRA of rank 8 does not fit in the 13.0 GB" in plan.answer
    option = plan.advice.partition("helps: ")[2].partition(" (")[0]
    assert option == "--devices 4 --zero 3"
    two, four = (
        costmodel.plan("llama-3-8b", "rtx-3090", tokens=512, devices=count, zero=3, fit=13e9, lora=8).best
        for count in (2, 4)
    )
    assert two.tight
    assert four.fits
    assert not four.tight


@pytest.mark.parametrize(
    ("model", "hardware", "asked", "advised"),
    [
        ("llama-3-8b", "h100", {"devices": 8}, "helps: --zero 3 ("),
        ("llama-3-8b", "h100", {"devices": 2}, "helps: --zero 3 ("),
        ("llama-3-8b", "h100", {"devices": 2, "in_backward": True}, "helps: --zero 1 ("),
        # not 1, where 7 fit, and 10 tightly
        ("llama-3-8b", "h100", {"sequences": 64, "optimizer": "adam-16bit"}, "helps: --sequences 7 ("),
        ("llama-3-8b", "a100-80gb", {}, "helps: --optimizer adam-16bit (bf16: 64.6 GB)"),  # adam-8bit is tight
        ("llama-3-8b", "rtx-4090", {"devices": 8}, "GB, tight)"),  # before adapters
        ("mistral-7b", "l4", {}, "helps: --optimizer adam-8bit-16bit --offload --in-backward"),  # before adapters
        ("llama-3-8b", "rtx-4090", {"optimizer": "adafactor"}, "helps: --lora 16"),  # before more devices
        ("llama-3-70b", "rtx-4090", {"in_backward": True}, "no change"),  # ZeRO 3 is refused beside it
        ("gpt2", "t4", {}, "helps: --sequences 11 with bf16 ("),  # a larger batch before another method
        ("llama-3-8b", "rtx-4090", {"lora": 16, "tokens": 2048}, "helps: --chunked-loss --sequences "),  # which fits
    ],
)
def test_advice_keeps_what_was_asked_for_and_changes_as_little_as_helps(model, hardware, asked, advised):
    assert advised in costmodel.plan(model, hardware, **asked).advice


def test_stored_scores_are_pointed_out():
    stored = [costmodel.plan("transformer_iwslt_de_en", fused_attention=fused).notes for fused in (False, True)]
    assert ["--fused-attention" in " ".join(notes) for notes in stored] == [True, False]
    assert "--fused-attention" not in " ".join(costmodel.plan("gpt2").notes)


@pytest.mark.parametrize("name", ["adam-8bit", "adam-16bit", "adafactor", "sgd", "sgd-16bit"])
def test_optimizers_keep_less_than_adam(name):
    """Bytes a parameter, by hand: fp32 weights and gradients of 4, a 16-bit copy, and the optimizer's."""
    state = {"adam-8bit": 4 + 4 + 2 + 2 + 8 / 256, "adam-16bit": 2 + 2 + 4, "adafactor": 10, "sgd": 10, "sgd-16bit": 4}
    workload = load_workload("gpt2", sequences=1, target_length=1)
    memory, adam = (peak_memory(workload, Method("", BF16, optimizer=it)) for it in (name, "adam"))
    assert memory.totals[-1] == pytest.approx(state[name] * workload.parameters)
    assert memory.peak < adam.peak
    times = [step_time(workload, Method("", BF16, optimizer=it), H100).update for it in (name, "adam")]
    assert times[0] < times[1]


def test_weights_of_four_bits_are_widened_to_be_multiplied():
    workload = AskedStep("llama-3-8b", tokens=64, lora=8).build()
    wide, narrow = (Method("", BF16, recompute=True, base_bits=bits) for bits in (0, NF4_BITS))
    assert step_time(workload, narrow, H100).compute > step_time(workload, wide, H100).compute


def test_a_loss_in_chunks_spares_the_logits_and_no_product():
    whole, chunked = (AskedStep("gpt2", sequences=8, chunked_loss=chunked).build() for chunked in (False, True))
    assert chunked.macs == whole.macs
    spared = [peak_memory(workload, Method("", BF16, recompute=True)).peak for workload in (whole, chunked)]
    logits = 8 * 1024 * 50257
    assert spared[0] - spared[1] > 8 * logits  # log-probabilities and gradients in fp32


def test_a_fused_loss_saves_16_bits_of_the_logits_and_writes_their_gradient():
    usual, fused = (AskedStep("gpt2", sequences=8, fused_loss=once).build() for once in (False, True))
    peaks = [peak_memory(workload, Method("", BF16, recompute=True)) for workload in (usual, fused)]
    logits = 8 * 1024 * 50257
    there = [memory.bytes[len(memory.operations) + 1, [Category.LOGITS, Category.TEMPORARY]].sum() for memory in peaks]
    assert there[1] == pytest.approx((2 + 2) * logits, rel=0.02)
    assert there[0] == pytest.approx((4 + 2 * 4) * logits, rel=0.02)


def test_a_gradient_that_is_scattered_leaves_no_copy_beside_its_sum():
    """Under FSDP each micro-batch's gradients are scattered and added to a shard."""
    workload = OPT.build()
    for zero, more in ((2, 0), (1, 1)):
        one, many = (Method("", BF16, devices=8, zero=zero, accumulates=many) for many in (False, True))
        memories = [peak_memory(workload, method).bytes[-2, Category.TEMPORARY] for method in (one, many)]
        assert (memories[1] > memories[0]) == bool(more)


def test_a_method_that_fits_with_its_loss_in_chunks_says_so():
    """MPT-125M, 52 sequences of 1,024 tokens on an A100 of 40 GB, ran with a loss that keeps no fp32 logits."""
    plan = costmodel.plan("gpt2", "a100-40gb", devices=8, zero=3, sequences=52)
    record = rows(plan)["bf16"].record()
    assert (record["fits"], record["peak_GB"] > 40) == ("chunked loss", True)
    assert rows(costmodel.plan("gpt2", "a100-40gb", devices=8, zero=3, sequences=52, chunked_loss=True))["bf16"].fits
    assert rows(costmodel.plan("gpt2", fit=1e9))["bf16"].record()["fits"] == "no"


def test_fsdp_keeps_no_cast_weights_but_gathers_layers():
    """Autocast under ZeRO-3 once kept 16 bits a parameter whole on each device."""
    workload = load_workload("opt_1.3b", sequences=1, target_length=16)
    shared, layer = peak_memory(workload, Method("", AUTOCAST, devices=64, zero=3)), 12 * 2048**2 * 2
    root = (50272 + 2050) * 2048 * 2
    assert shared.categories["parameters"] == pytest.approx(4 * workload.parameters / 64 + root + 2 * layer, rel=0.01)


def test_batches_of_a_step_take_their_time_and_one_update():
    one, four = (costmodel.plan("opt_1.3b", "h100", tokens=256, accumulate=count) for count in (1, 4))
    first, rest = rows(one)["bf16"].step, rows(four)["bf16"].step
    assert rest.compute == pytest.approx(4 * first.compute)
    assert rest.update == first.update
    assert rows(four)["bf16"].memory.peak > rows(one)["bf16"].memory.peak  # a new gradient beside its sum


def test_stages_pass_on_a_row_a_token_whatever_the_experts():
    """2 bytes a value, to the next stage and back; a pipeline stands idle for a micro-batch a stage."""
    model = replace(load_shapes("opt_1.3b"), sequences=1, target_length=256)
    shard, bf16 = Shard(pipeline=2), Method("bf16", BF16)
    for shapes in (model, replace(model, decoder=replace(model.decoder, experts=MixtureOfExperts(8, 4, 256)))):
        assert sent_inside(stages(shapes, shard)[0], shard, bf16) == 2 * 256 * model.decoder.d * 2
    made = stages(model, shard)
    slowest = max(step_time(stage, bf16, H100).compute for stage in made)
    assert sharded_step(made, bf16, shard, 4, H100).compute == pytest.approx(5 * slowest)
    assert sharded_memory(made, bf16, shard, 4).peak < peak_memory(OPT.build(), bf16).peak


def test_an_offloaded_state_crosses_the_hosts_link():
    """Adam's two moments and the master weights, 12 bytes a parameter, leave the device; without a working copy the
    weights stay."""
    workload = OPT.build()
    for setup, bytes_ in ((BF16, 12), (FP32, 8)):
        method = Method("", setup, recompute=True)
        away = replace(method, offload=True)
        assert state(workload, method).sum() - state(workload, away).sum() == bytes_ * workload.trained
        there, gone = (step_time(workload, one, H100).update for one in (method, away))
        assert there < gone == pytest.approx(bytes_ * workload.trained / (0.8 * 63e9))


def test_an_update_in_the_backward_leaves_the_gradients_of_one_layer():
    workload = OPT.build()
    whole, freed = (peak_memory(workload, Method("", FP32, in_backward=once)) for once in (False, True))
    assert whole.bytes[-1, Category.GRADIENTS] == 4 * workload.trained
    assert freed.bytes[:, Category.GRADIENTS].max() == 4 * max(op.parameters for op in workload.operations)


def test_selective_recomputation_keeps_the_results_of_every_second_layer():
    """A layer of OPT (d 2048, ffn 8192) keeps its input, q, v, fc1 (layers 1, 3, 5), attention's result, and 4 bytes a
    row of scores."""
    workload = AskedStep("opt_1.3b", tokens=256).build()
    full, selective = (Method("", BF16, recompute=True, selective=kept) for kept in (False, True))
    more = peak_memory(workload, selective).saved - peak_memory(workload, full).saved
    assert more == 24 * 256 * (2 * (2048 + 2048 + 8192 + 2048) + 4 * 32)
    none = Method("", BF16)
    times = [step_time(workload, method, H100).compute for method in (none, selective, full)]
    assert times == sorted(times)


#: the fields of a plan's JSON, as docs/cost-model.md has them
FIELDS = {
    *("answer", "workload", "tokens", "parameters", "trained", "macs", "source", "hardware", "rates"),
    *("hardware_sources", "budget_bytes", "devices", "zero", "tensor", "pipeline", "accumulate", "optimizer"),
    *("offload", "foreach", "in_backward", "compiled", "best", "methods", "notes", "hours", "cost"),
    *("largest_batch", "longest_context"),
}
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/cost-model.md").read_text()
TABLE = PAGE.partition("| field of a method | |")[2].partition("\n\n")[0]
METHOD_FIELDS = {"method", *", ".join(re.findall(r"^\| (\w.*?) \|", TABLE, re.MULTILINE)).split(", ")}


def test_json_has_the_documented_fields_and_is_what_python_gives(capsys, tmp_path):
    path = small_gpt2(tmp_path)
    command = ["plan", "--workload", path, "--hardware", "a100-40gb", "--devices", "8", "--zero", "3"]
    assert main([*command, "--sequences", "4", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert set(output) == FIELDS
    checkpoints = {"bf16, recompute", "bf16 autocast, recompute", "bf16, selective recompute"}
    assert {"bf16", "bf16 autocast"} | checkpoints <= {record["method"] for record in output["methods"]}
    for record in output["methods"]:
        assert set(record) == METHOD_FIELDS
        assert record["tokens/s"] == pytest.approx(8 * output["tokens"] / record["step_ms"] * 1e3)
        assert record["step_ms_low"] <= record["step_ms"] <= record["step_ms_high"]
    assert output == costmodel.plan(path, "a100-40gb", devices=8, zero=3, sequences=4).as_dict()


def test_steps_that_python_launches_take_what_an_h100s_host_took():
    """Milliseconds of analysis/results/gpu_steps.csv: GPTs without dropout, of 12 and of 24 layers."""
    with (ROOT / "analysis/results/gpu_steps.csv").open() as lines:
        took = {(r["model"], r["setup"]): float(r["ms"]) for r in csv.DictReader(lines) if "H100" in r["machine"]}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    eight, level = Setup(DSQ, Precision(8, 4, 8, 8)), "dsq [8,4,8,8], "
    methods = {
        f"{level}linears": Method("", eight),
        f"{level}all": Method("", eight, stash=whole_stash(eight)),
        "bf16, checkpoints": Method("", BF16, recompute=True),
        "bf16": Method("", BF16),
    }
    for name, layers in (("124 million", 12), ("1.3 billion", 24)):
        config = {"model_type": "gpt2", "vocab_size": 50304, "n_embd": 768, "n_layer": layers, "n_head": 12}
        config |= {"n_positions": 1024, "activation_function": "gelu"} | drops
        workload = build(transformer_of(config, "a GPT")).fusing_attention()
        for setup, method in methods.items():
            if name == "124 million" or setup.endswith("all"):  # else the GPU takes longer than its host
                assert 1e3 * launching_seconds(workload, method) == pytest.approx(took[name, setup], rel=0.04)


def test_only_what_trainings_support_is_advised():
    plan = costmodel.plan("gpt2", "rtx-3090", sequences=16)
    doubted = {row.method.name for row in plan.rows if not row.method.trusted}
    assert {"bf16, bfp 2", "bf16, wtacrs 0.3", "dsq [16,4,4,16]"} <= doubted
    assert plan.best.method.trusted
    assert not any(name in plan.answer for name in doubted)
