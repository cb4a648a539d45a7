"""Answers to people who plan hardware, beside sums by hand: parameters, products, times, bytes kept, sent, packed."""

import json
import re
import shlex
from argparse import ArgumentTypeError
from dataclasses import replace
from itertools import permutations

import pytest

from dsq import costmodel
from dsq.costmodel.cli.commands.step import plan
from dsq.costmodel.cli.main import BYTES, COUNTS, amount, main, parser
from dsq.costmodel.hardware.hardware import Pass, load_hardware
from dsq.costmodel.model.methods import AUTOCAST, BF16, FP32, POLICIES, USUAL, Method
from dsq.costmodel.model.operations import Gemm, Pointwise, Workload
from dsq.costmodel.planning.plan import RESERVED
from dsq.costmodel.planning.step import RANGES, communication_bytes, packing_seconds, sending_seconds, step_time
from dsq.costmodel.workloads.named import AskedStep, load_workload
from dsq.costmodel.workloads.transformer import Shard
from tests.costmodel.workloads.models import small_gpt2

H100, ROBERTA = load_hardware("h100"), load_workload("roberta_base_mnli")
#: parameters as published: Llama-2-13B, Mistral-7B, GPT-2 XL
LLAMA_13, MISTRAL, XL = 13_015_864_320, 7_248_023_552, 1_557_611_200


def row(method, *asked, **options):
    alone = tuple(each for each in USUAL if each.name == method)  # costed in a part of the time of all
    return {row.method.name: row for row in costmodel.plan(*asked, methods=alone, **options).rows}[method]


# ---- what lies in memory at the update: weights, gradients, Adam's moments, a working copy


@pytest.mark.parametrize(
    ("zero", "method", "bytes_"),
    [
        (0, "bf16", 18 + 4),  # DDP's buckets, a copy of the gradients
        (1, "bf16", 2 + 4 + 12 / 8),
        (2, "bf16", 2 + 4 / 8 + 12 / 8),
        (3, "bf16", 18 / 8),
        (1, "bf16 autocast", 4 + 4 + 8 / 8),
        (3, "bf16 autocast", 16 / 8),
    ],
)
def test_what_eight_devices_share_under_zero(zero, method, bytes_):
    memory = row(method, "gpt2-xl", tokens=128, devices=8, zero=zero).memory
    assert memory.totals[-1] == pytest.approx(bytes_ * XL)


def test_eight_tensor_parallel_devices_have_an_eighth_each_and_whole_norms_and_sum_two_results_a_layer_and_pass():
    """7/8 of 512 x 5,120 values of 2 bytes, twice each, forward and backward, in 40 layers."""
    cost = row("bf16", "llama-2-13b", "h100", tokens=512, tensor=8)
    assert cost.memory.totals[-1] == pytest.approx(18 * (LLAMA_13 + 7 * 81 * 5120) / 8)
    sent = 40 * 2 * 2 * 2 * 7 / 8 * 512 * 5120 * 2
    assert cost.sent == pytest.approx(sent)
    assert cost.step.communication == pytest.approx(sent / H100.link)


def test_lora_and_qlora_of_mistral_7b():
    """Adapters of rank 64 on queries and values, or on all layers, at 18 bytes; tables and the output keep 16 bits."""
    queries_and_values = 32 * 64 * (2 * 4096 + 4096 + 1024)
    asked = {"tokens": 128, "lora": 64, "lora_layers": "(q|v)_proj"}
    memory = row("LoRA 64", "mistral-7b", "rtx-4090", **asked).memory
    assert memory.totals[-1] == pytest.approx(2 * MISTRAL + 18 * queries_and_values)
    copied = row("LoRA 64 by PEFT", "mistral-7b", "rtx-4090", **asked).memory.saved
    assert copied - memory.saved == 2 * 32 * 128 * 4096  # two of x in 16 bits, where one was shared
    dropped = row("LoRA 64", "mistral-7b", "rtx-4090", **asked, lora_dropout=True).memory.saved
    # each keeps what it reads in 16 bits, and a mask of bytes but for the first, in place of x in 16 bits for both
    assert dropped - memory.saved == 128 * 4096 * (32 * (2 * (2 + 1) - 2) - 1)
    all_layers = 32 * 64 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    rest = 2 * 32768 * 4096 + 65 * 4096
    memory = row("QLoRA 64", "mistral-7b", "rtx-4090", tokens=128, qlora=64).memory
    assert memory.totals[-1] == pytest.approx((MISTRAL - rest) * 4.127 / 8 + 2 * rest + 18 * all_layers, rel=1e-4)


# ---- products: multiply-accumulates of a step, three for each weight and token, and attention's


def causal(layers, width, tokens):
    """A fused kernel's: two products forward, five backward, over the half that a mask leaves."""
    return layers * width * (tokens * (tokens + 1) // 2) * 7


def test_a_context_of_128k_of_llama_3_1_8b():
    tokens = 2**17
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    asked = load_workload("llama-3.1-8b", sequences=1, target_length=tokens)
    assert asked.macs == 3 * weights * tokens + causal(32, 4096, tokens)


# ---- what is sent


def test_rings_of_tensor_parallel_devices_share_the_network_between_nodes():
    """Four replicas of a node each: eight rings, an eighth of the gradients in each, at an eighth of the network."""
    alone, four = (row("bf16", "llama-2-13b", "h100", tokens=512, tensor=8, devices=devices).step for devices in (1, 4))
    messages, hops = 2 * 41, 3 * H100.efficiency.hop_between_nodes
    gradients = 2 * 3 / 4 * 4 * (LLAMA_13 + 7 * 81 * 5120) / 8
    expected = gradients / (H100.network / 8) + messages * hops
    assert four.communication - alone.communication == pytest.approx(expected)
    wide = row("bf16", "llama-3-70b", "h100", tokens=512, tensor=16).step  # of two nodes
    assert wide.communication == pytest.approx(80 * 2 * 2 * 2 * 15 / 16 * 512 * 8192 * 2 / H100.network)


# ---- what is asked in other words, or contradicts itself


@pytest.mark.parametrize("options", ["--chunked-loss", "--freeze layers", "--freeze words --accumulate 4"])
def test_a_pipeline_takes_options_that_change_one_of_its_stages(options):
    """The first stage has no loss, and may train nothing: both were once refused, advice with them."""
    answer = plan(parser().parse_args(["plan", "gpt2", "--pipeline", "2", *shlex.split(options)]))
    assert answer.facts["pipeline"] == 2
    assert answer.sections[0].records


def test_the_largest_batch_of_a_pipeline_whose_fullest_stage_changes_with_it():
    """Its two stages have other numbers of operations: numpy's complaint about their shapes was once the answer."""
    options = {"pipeline": 2, "chunked_loss": True, "fit": 8e9}
    largest = row("bf16", "bert-base", "h100", **options).largest_batch
    peaks = [row("bf16", "bert-base", "h100", sequences=largest + more, **options).memory.peak for more in (0, 1)]
    assert peaks[0] <= 8e9 < peaks[1]


@pytest.mark.parametrize(
    ("text", "units", "size"),
    [("24gib", BYTES, 24 * 2**30), ("24.0 GIB", BYTES, 24 * 2**30), ("10B", COUNTS, 1e10), ("5e2", COUNTS, 500)],
)
def test_sizes_are_read_whatever_their_case(text, units, size):
    assert amount(text, units, "") == size


@pytest.mark.parametrize("text", ["0B", "10 billion", "-3"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="must be a number above 0, as in 10B, got"):
        amount(text, COUNTS, "10B")


# ---- the questions that people ask in one line


def test_the_largest_batch_and_the_longest_context_are_those_of_all_methods_that_are_shown():
    """Once those of the quickest method alone: 11,304 tokens, where checkpoints leave room for nine times as many."""
    plan = costmodel.plan("llama-2-7b", "h100", lora=16)
    batch, context = plan.largest_batch, plan.longest_context
    assert plan.best.method.name == "LoRA 16"
    assert (batch.method, context.method) == ("LoRA 16, recompute", "LoRA 16, recompute")
    assert batch.size == max(row.largest_batch for row in plan.rows)
    sizes = "has {:,} sequences ({}), the longest context {:,} tokens ({}), beyond its 4,096 positions (with "
    assert sizes.format(batch.size, batch.method, context.size, context.method) in plan.answer
    peaks = [row(context.method, "llama-2-7b", "h100", lora=16, tokens=context.size + n).memory.peak for n in (0, 1)]
    assert peaks[0] <= plan.question.memory < peaks[1]
    for each in plan.rows:
        if each is not plan.best:
            assert row(each.method.name, "llama-2-7b", "h100", lora=16, tokens=context.size + 1).memory.peak > 84e9
    learned = costmodel.plan("gpt2", "h100").longest_context
    assert learned == (1024, "bf16", False)  # its table has no more
    assert costmodel.plan("llama-3-8b", "h100").longest_context is None  # nothing fits


def test_sizes_that_were_not_exceeded_are_no_answers(tmp_path):
    plan = costmodel.plan("llama-2-7b", "h100", lora=1, lora_layers="q_proj", fit=1e18)
    assert "has at least 1,048,576 sequences, the longest context at least 1,048,576 tokens, beyond" in plan.answer
    assert "largest batch: no more than 1,048,576 are tried." in plan.notes


def test_hours_and_price_of_a_whole_training():
    plan = costmodel.plan("gpt2", "h100", gpus=4, train_tokens=1e9, price=2)
    hours = 1e9 / plan.best.tokens_per_second / 3600
    assert (plan.hours, plan.cost) == (hours, pytest.approx(hours * 4 * 2))
    assert (
        f"1,000,000,000 tokens take {hours:.1f} hours and cost {hours * 8:,.0f} at 2 an hour and device." in plan.answer
    )
    with pytest.raises(ValueError, match="--price needs --train-tokens"):
        costmodel.plan("gpt2", "h100", price=2)


def test_what_does_not_fit_has_the_price_of_the_advice():
    plan = costmodel.plan("llama-3-8b", "a100-80gb", gpus=4, train_tokens=1e9, price=2)
    option, changed, row = plan.change_to_fit
    assert (option, changed.zero, row.fits) == ("--zero 3", 3, True)
    assert f"--zero 3 ({row.method.name}: {row.memory.peak / 1e9:.1f} GB). With --zero 3 1,000,000,000" in plan.answer
    assert plan.cost == pytest.approx(1e9 / row.tokens_per_second / 3600 * 8)
    nothing = costmodel.plan("llama-3.1-405b", "t4", train_tokens=1e9, price=2)
    assert (nothing.hours, nothing.cost) == (None, None)
    assert "hours" not in nothing.answer


def test_what_fits_but_for_what_is_reserved_is_tight():
    peak = costmodel.plan("gpt2", "h100").best.memory.peak
    plans = [costmodel.plan("gpt2", "h100", fit=share * RESERVED * peak) for share in (1.01, 0.99)]
    assert [plan.best.record()["fits"] for plan in plans] == ["yes", "tight"]
    assert [", which is tight" in plan.answer for plan in plans] == [False, True]
    assert not costmodel.plan("gpt2", "laptop-cpu", fit=4e9).best.tight  # its allocator gives blocks back


def test_a_loss_in_chunks_is_named_where_it_raises_what_fits():
    plan = costmodel.plan("llama-3-8b", "h100", lora=16, tokens=2048)
    chunked = costmodel.plan("llama-3-8b", "h100", lora=16, tokens=2048, chunked_loss=True)
    sizes = chunked.largest_batch.size, chunked.longest_context.size
    assert "(with --chunked-loss {:,} sequences, {:,} tokens)".format(*sizes) in plan.answer
    assert "chunked" not in chunked.answer


def test_the_time_is_split_between_arithmetic_and_dram():
    plan = costmodel.plan("llama-3-8b", "h100", lora=16, tokens=2048)
    share = plan.best.step.waiting
    assert f", {1 - share:.0%} arithmetic, {share:.0%} DRAM; " in plan.answer
    assert 0.2 < share < 0.5


def test_the_time_that_links_take_is_no_arithmetic():
    step = costmodel.plan("llama-2-7b", "h100", offload=True).best.step
    assert 0.8 < step.shares["the host's link"] == step.update / step.seconds
    assert step.bound == "host link"
    sharded = costmodel.plan("llama-2-70b", "h100", gpus=8, zero=3)
    step = sharded.best.step
    assert step.shares["links between devices"] == step.exposed / step.seconds > 0.2
    assert sum(step.shares.values()) == pytest.approx(1)
    assert f"{step.exposed / step.seconds:.0%} links between devices; " in sharded.answer


def test_the_least_devices_that_fit():
    """Of all counts, not of powers of two alone: 3 A6000, with the least stage of ZeRO at which so many fit."""
    count, zero = map(int, costmodel.plan("llama-3-8b", "a6000").least_devices.split(", ZeRO "))
    fits = {
        (devices, stage): costmodel.plan("llama-3-8b", "a6000", devices=devices, zero=stage).best.fits
        for devices in (count - 1, count)
        for stage in range(4)
    }
    assert {asked for asked in fits if fits[asked]} == {(count, stage) for stage in range(zero, 4)}
    assert (count, zero) == (3, 3)
    assert costmodel.plan("gpt2", "t4").least_devices == "1"


def test_the_devices_that_fit_the_fastest_first():
    every = costmodel.compare_devices("llama-3-8b", lora=16, tokens=2048)
    plans = [plan for plan in every if plan.best.fits]
    assert every[: len(plans)] == plans
    speeds = [plan.best.tokens_per_second for plan in plans]
    assert speeds == sorted(speeds, reverse=True)
    names = [plan.question.hardware.name for plan in plans]
    assert "NVIDIA H100-SXM5-80GB" in names
    assert "Tesla T4" not in " ".join(names)
    assert all(plan.best.memory.peak <= plan.question.memory for plan in plans)
    alone = costmodel.plan("llama-3-8b", "rtx-4090", lora=16, tokens=2048)
    (compared,) = (plan for plan in every if plan.question.hardware == alone.question.hardware)
    assert (compared.best.memory.peak, compared.best.step) == (alone.best.memory.peak, alone.best.step)
    assert compared.least_devices == alone.least_devices
    with pytest.raises(ValueError, match="unknown workload 'lama-9'"):
        costmodel.compare_devices("lama-9")


def test_a_batch_that_is_advised_is_not_tight_though_shards_of_gradients_are_reserved():
    asked = costmodel.plan("llama-3-8b", "h100", devices=8, zero=3, sequences=64, tokens=2048)
    option, question, cost = asked.change_to_fit
    sequences = int(re.fullmatch(r"--sequences (\d+)", option)[1])
    assert cost.fits
    assert not cost.tight
    assert question.cost_of(cost.method, sequences=sequences + 1).tight


def test_what_is_offloaded_lies_in_the_hosts_memory():
    answer = costmodel.plan("opt_1.3b", "rtx-4090", offload=True)
    hosts = {made.method.name: made.host for made in answer.rows}
    assert (hosts["bf16"], hosts["bf16 autocast"]) == (12 * 1_315_758_080, 8 * 1_315_758_080)  # without a working copy
    assert f"--offload: {answer.best.host / 1e9:.1f} GB a device lie in the host's memory." in answer.notes


def test_adamw_copies_the_weights_unless_it_is_fused():
    """Full fine-tuning of Mistral-7B took 72.97 GB at 4 and at 8 sequences (fms-acceleration, a100_80gb.csv)."""
    options = {"tokens": 4096, "optimizer": "adam-16bit", "hardware": "a100-80gb", "foreach": True}
    for sequences in (4, 8):
        cost = row("bf16, recompute", "mistral-7b", sequences=sequences, **options).memory
        assert cost.peak == pytest.approx(72.97e9, rel=0.01)
        assert cost.cause == "update"
    plan = costmodel.plan("qwen2.5-1.5b", "rtx-3090", tokens=64, fit=28e9)
    assert any("give AdamW fused=True" in note for note in plan.notes)
    with pytest.raises(ValueError, match="--foreach is of --optimizer adam"):
        costmodel.plan("gpt2", foreach=True, optimizer="sgd")
    calls, kernel = (costmodel.plan("gpt2", foreach=foreach).rows[0].step.update for foreach in (True, False))
    assert calls == pytest.approx(kernel * 20 / 7)


def test_a_compiled_step_saves_the_inputs_of_its_passes_alone():
    """Written out, GPT-2's gelu saves three tensors more, of 3,072 values in 16 bits a token and layer; the loss log p
    in fp32, and compiled the logits in 16 bits. Of Llama's norms x in fp32, and of its gates f(gate), are not saved."""
    eager, compiled = (costmodel.plan("gpt2", compiled=it).rows for it in (False, True))
    saved = [next(row.memory.saved for row in rows if row.method.name == "bf16") for rows in (eager, compiled)]
    assert saved[0] - saved[1] == 3 * 12 * 1024 * 3072 * 2 + 1024 * 50257 * (4 - 2)
    kinds = {op.kind for op in costmodel.plan("llama-3-8b", compiled=True).question.stages(USUAL[0])[0].operations}
    assert {"norm", "fused gate", "fused loss"} < kinds
    assert not kinds & {"rms", "gate", "loss of fp32"}


def test_a_small_model_waits_for_python():
    """12 layers, each of which takes an H100's host 2.77 ms."""
    eager, compiled = (costmodel.plan("transformer_iwslt_de_en", "a100-80gb", compiled=it) for it in (False, True))
    assert eager.best.method.name == "bf16"  # of those that wait as long the smallest
    assert eager.best.step.launched == pytest.approx(12 * 2.77e-3)
    assert (eager.best.step.bound, compiled.best.step.bound) == ("host", "memory")
    assert compiled.best.step.launched == compiled.best.step.seconds
    assert "bound by Python" in eager.answer
    assert "--sequences 256" in eager.advice


@pytest.mark.parametrize(("sequences", "published"), [(4, 1764), (8, 1919)])
def test_experts_multiply_more_slowly_than_linear_layers(sequences, published):
    """Tokens a second of Mixtral by QLoRA on an A100 (fms-acceleration, a100_80gb.csv)."""
    options = {"tokens": 4096, "qlora": 16, "lora_layers": "q_proj,k_proj,v_proj,o_proj", "sequences": sequences}
    speed = row("QLoRA 16, recompute", "mixtral-8x7b", "a100-80gb", **options).tokens_per_second
    assert speed == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(("bits", "bytes_"), [(4, 4.127 / 8), (8, 1), (16, 2), (32, 4)])
def test_adapters_over_weights_of_few_or_many_bits(bits, bytes_):
    plan = costmodel.plan("mistral-7b", "a100-80gb", lora=8, base_bits=bits, tokens=64)
    layers = MISTRAL - 2 * 32768 * 4096 - 65 * 4096
    rest = (MISTRAL - layers) * (4 if bits == 32 else 2)
    held = plan.rows[0].memory.totals[-1] - (16 if bits == 32 else 18) * plan.workload.trained
    assert held == pytest.approx(layers * bytes_ + rest, rel=1e-3)


def test_a_sequence_longer_than_the_positions_is_refused_or_noted():
    with pytest.raises(ValueError, match=r"gpt2 has a table of 1,024 positions: give at most as many tokens"):
        costmodel.plan("gpt2", tokens=1025)
    answers = [costmodel.plan("llama-2-7b", lora=8, tokens=tokens).answer for tokens in (4096, 4097)]
    beyond = "llama-2-7b with LoRA of rank 8 at 4,097 tokens, beyond its 4,096 positions, fits in "
    assert [answer.startswith(beyond) for answer in answers] == [False, True]


def test_stages_of_a_pipeline_may_be_uneven():
    """12 layers over 5 stages: three, three, two, two, two; the first and one of the last are costed."""
    first, last = AskedStep("gpt2").parts(Shard(pipeline=5))
    counts = [len({op.name.split(".")[2] for op in stage.gemms if "layers." in op.name}) for stage in (first, last)]
    assert counts == [3, 2]
    with pytest.raises(ValueError, match="--pipeline 13: gpt2 has 12 layers"):
        AskedStep("gpt2").parts(Shard(pipeline=13))


def test_words_in_any_order_are_a_model_and_precisions(capsys):
    answers = set()
    for order in permutations(["gpt2", "[4,4,4,8]", "--json"]):
        assert main(["plan", *order, "bfp:[16,4,4,16]"]) == 0
        answers.add(capsys.readouterr().out)
    (answer,) = map(json.loads, answers)
    assert answer["workload"] == "gpt2"
    assert [record["method"] for record in answer["methods"]] == ["snvint [4,4,4,8]", "bfp [16,4,4,16]"]


def test_a_traced_step_keeps_its_tokens(capsys, tmp_path):
    path = tmp_path / "traced.json"
    layer = {"op": "gemm", "name": "fc", "M": 1, "K": 1, "N": 1}
    path.write_text(json.dumps({"costmodel": 1, "name": "a", "tokens": 1, "operations": [layer]}))
    assert main(["plan", str(path), "--tokens", "4"]) == 2
    assert "states its own sizes: tokens cannot be changed" in capsys.readouterr().err
    plan = costmodel.plan(str(path))
    assert (plan.largest_batch, plan.advice) == (None, "its batch is fixed: trace it with another one")


def test_a_small_model_takes_megabytes(tmp_path):
    plan = costmodel.plan(small_gpt2(tmp_path), "t4", tokens=64, fit=99e6)
    assert re.search(r"fits in the 99\.0 MB of one .* takes \d\.\d MB", plan.answer)


def test_sending_takes_the_slower_of_two_links_and_a_latency_for_each_hop():
    """A model of one layer under ZeRO-3: two gathers and a scatter, of the layer and of the rest."""
    layer = Gemm("decoder.layers.0.fc", 64, 512, 512)
    workload = Workload("one", (layer, Pointwise("optimizer", "adam", layer.parameters, 1)), tokens=64)
    hop, between = H100.efficiency.hop, H100.efficiency.hop_between_nodes
    for devices, rate, hops in ((8, H100.link, 7 * hop), (64, H100.network, 56 * hop + 7 * between)):
        method = Method("", BF16, devices=devices, zero=3)
        expected = communication_bytes(workload, method) / rate + 6 * hops
        assert sending_seconds(workload, method, H100) == pytest.approx(expected)


def test_a_step_waits_for_a_share_of_what_it_sends_and_for_what_it_cannot_hide():
    method, share = Method("", BF16, devices=8), H100.efficiency.exposed
    hidden = step_time(ROBERTA, method, H100)
    assert hidden.communication < hidden.compute
    assert hidden.exposed == pytest.approx(share * hidden.communication)
    slow = step_time(ROBERTA, method, replace(H100, link=H100.link / 1000))
    assert slow.exposed == pytest.approx(slow.communication - (1 - share) * slow.compute)


def test_fsdp_computes_in_16_bits_what_autocast_leaves_in_32():
    workload = load_workload("opt_1.3b")
    autocast, bf16 = (step_time(workload, Method("", setup, devices=8, zero=3), H100) for setup in (AUTOCAST, BF16))
    assert autocast == bf16


@pytest.mark.parametrize(
    ("setup", "optimizer", "word", "gradient"),
    [(FP32, "adam", 4, 4), (BF16, "adam", 2, 4), (BF16, "adam-16bit", 2, 2), (AUTOCAST, "adam", 4, 4)],
)
def test_what_no_device_has_whole_is_sent_for_each_micro_batch_as_wide_as_it_is_kept(setup, optimizer, word, gradient):
    """Under ZeRO-2 the gradients of each, under ZeRO-3 its weights too, for the forward and for the backward, and those
    that are frozen."""
    workload = ROBERTA.freezing("fc")
    assert 0 < workload.trained < workload.parameters
    gradients, weights = gradient * workload.trained, word * workload.trained
    gathered = 2 * (2 if setup.autocast else word) * workload.parameters
    for batches in (1, 8):
        sent = [2 * gradients, gradients + weights, batches * gradients + weights, batches * (gradients + gathered)]
        for zero, whole in enumerate(sent):
            method = Method("", setup, devices=8, zero=zero, optimizer=optimizer)
            assert communication_bytes(workload, method, batches) == pytest.approx(7 / 8 * whole)


def test_zero_shares_out_the_update():
    whole, shared = (step_time(ROBERTA, Method("", BF16, devices=8, zero=zero), H100) for zero in (0, 1))
    alone = step_time(ROBERTA, Method("", BF16), H100)
    moving = 30 * ROBERTA.trained / (H100.bandwidth * H100.efficiency.memory)  # bytes read and written
    assert alone.update == pytest.approx(moving + 8 * ROBERTA.trained / H100.vector_flops)  # values
    assert (whole.update, shared.update) == (alone.update, pytest.approx(alone.update / 8))
    assert whole.compute == shared.compute == alone.compute


def test_packing_takes_what_was_measured():
    """Values times ns, and a call: x and the activation's x are packed and unpacked, its y is made again."""
    size = 4096, 8, 8
    layers = (Gemm("a", *size, input="x"), Pointwise("g", "activation", 4096, 8), Gemm("b", *size, input="g"))
    workload = Workload("two", layers, tokens=4096)
    passes = {("pack", 4, phase): Pass(1e-9, 1e-6) for phase in ("forward", "backward")}
    method = Method("", FP32, stash=POLICIES["bfp 4"])
    assert packing_seconds(workload, Method("", FP32), H100) == 0
    timed = replace(H100, passes=passes)
    assert packing_seconds(workload, method, timed) == pytest.approx((2 * 2 + 1) * (4096 * 8 * 1e-9 + 1e-6))
    assert step_time(workload, method, timed).packing == packing_seconds(workload, method, timed)
    assert step_time(workload, method, timed).packing_measured


def test_packing_that_was_never_measured_moves_its_bytes_twice():
    """A kept x of 16 bits becomes codes of 4 bits and a half with their scales, and x again."""
    workload = Workload("one", (Gemm("a", 4096, 4096, 8, input="x"),), tokens=4096)
    method = Method("", BF16, stash=POLICIES["bfp 4"])
    expected = 2 * 4096 * 4096 * (16 + 4.5) / 8 / (H100.bandwidth * H100.efficiency.memory)
    assert packing_seconds(workload, method, H100) == pytest.approx(expected)
    assert not step_time(workload, method, H100).packing_measured


@pytest.mark.parametrize("quantization", [{"load_in_4bit": True}, {"bits": 4, "quant_method": "gptq"}, {"bits": 8}])
def test_weights_of_few_bits_are_trained_by_adapters_alone(quantization, tmp_path):
    path = small_gpt2(tmp_path, quantization_config=quantization)
    with pytest.raises(ValueError, match=r"quantization_config stores \d-bit .* weights, which --qlora RANK"):
        costmodel.plan(path, "h100")
    if quantization != {"bits": 8}:
        assert costmodel.plan(path, "h100", qlora=8, lora_layers="fc").rows


def test_gpus_are_all_devices_and_devices_the_data_parallel_ones():
    options = {"hardware": "h100", "tokens": 512, "tensor": 4}
    plans = [costmodel.plan("gpt2", **options, **count) for count in ({"gpus": 8}, {"devices": 2})]
    assert plans[0].as_dict() == plans[1].as_dict()
    assert "each of 8 NVIDIA H100" in plans[0].answer
    with pytest.raises(ValueError, match=r"--gpus 6 must be a positive multiple of --tensor times --pipeline \(4\)"):
        costmodel.plan("gpt2", **options, gpus=6)


def test_where_nothing_fits_the_answer_names_the_quickest_of_what_needs_least():
    """fp32 and 16-bit products with checkpoints need as little; once fp32, six times as slow, was named."""
    plan = costmodel.plan("llama-3-8b", "h100")
    assert plan.best.method.name == "bf16 autocast, recompute"
    assert plan.best.memory.peak == min(row.memory.peak for row in plan.rows if row.method.trusted)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "eager"),
        ({"hardware": "rtx-4090"}, "GDDR"),
        ({"hardware": "rtx-4090", "compiled": True}, "compiled"),
        ({"devices": 16, "zero": 3}, "several nodes"),
    ],
)
def test_the_range_of_a_step_is_that_of_its_kind(options, kind):
    step = costmodel.plan("gpt2", **({"hardware": "h100", "tokens": 64} | options)).rows[0].step
    assert (step.low, step.high) == RANGES[kind]


def test_a_compiled_step_moves_fewer_bytes_of_passes_and_saves_none_of_products():
    plans = [costmodel.plan("gpt2", "h100", sequences=8, compiled=compiled).rows[2].step for compiled in (False, True)]
    assert 0.3 < plans[1].compute / plans[0].compute < 0.9
    assert plans[0].update == pytest.approx(plans[1].update, rel=1e-6)


def test_a_pipeline_over_nodes_has_their_range():
    step = costmodel.plan("llama-2-70b", "a100-80gb", gpus=16, pipeline=16, accumulate=16).best.step
    assert (step.low, step.high) == RANGES["several nodes"]


def test_shards_of_gradients_are_reserved_beside_the_peak_under_zero_3():
    """FSDP allocates them on a stream of its own: PyTorch reuses no block of another stream."""
    one = row("bf16", "gpt2", "h100", gpus=4, zero=3)
    assert one.memory.cause == "backward of loss"  # before the first gradient
    assert one.reserved == pytest.approx(RESERVED * (one.memory.peak + 4 / 4 * 124_439_808))


def test_what_fits_as_allocated_may_be_tight():
    """Of 1.1 times the peak an allocator that reserves 1.14 times as much has too little; a CPU's reserves none. A
    training that does not fit has no price."""
    peak = row("bf16", "gpt2", "h100").memory.peak
    told = [costmodel.plan("gpt2", hardware, fit=share * peak) for hardware, share in (("h100", 1.1), ("h100", 1.2))]
    fits = [next(each.record()["fits"] for each in plan.rows if each.method.name == "bf16") for plan in told]
    assert fits == ["tight", "yes"]
    assert any("tight: fits as allocated" in note for note in told[0].notes)
    assert not any(each.tight for each in costmodel.plan("gpt2", "laptop-cpu", fit=1.1 * peak).rows)
    rows = [next(each for each in plan.rows if each.method.name == "bf16") for plan in told]
    assert [each.reserved / peak for each in rows] == pytest.approx([1.1, RESERVED])  # it frees blocks before it fails
    assert f"GB (about {told[1].best.reserved / 1e9:.1f} GB reserved)" in told[1].answer
    refused = costmodel.plan("llama-3-8b", "rtx-4090", train_tokens=1e9, price=2.0)
    assert ". With --" in refused.answer.partition("hours")[0]  # what is advised
