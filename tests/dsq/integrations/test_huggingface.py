"""Hugging Face's Trainer and TRL's with transformers' own models: saved, compiled, their stash; converted models that
PEFT or transformers change."""

import warnings

import pytest
import torch

import dsq
from analysis.library_models import transformer

pytest.importorskip("transformers", reason="the callback needs transformers, which is not installed")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")
import transformers

from dsq.integrations.huggingface import PrecisionCallback, restore
from dsq.stash.controller import applied
from tests.dsq.stash.graphs.divided import divided

IDS = torch.arange(256).view(16, 16) % 64
ROWS = [{"input_ids": ids, "labels": ids} for ids in IDS]


def gpt(blocks):
    torch.manual_seed(0)
    return transformer("gpt2", 32, blocks, 2, words=64, n_positions=16)[0]


def arguments(folder, kind=transformers.TrainingArguments, **options):
    usual = {"max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True}
    return kind(str(folder), disable_tqdm=True, save_strategy="no", **usual | options)


def trained(folder, callback, blocks=2, **options):
    model = gpt(blocks)
    trainer = transformers.Trainer(model, arguments(folder, **options), train_dataset=ROWS, callbacks=[callback])
    trainer.train()
    return model, trainer


def test_one_line_packs_the_whole_stash_and_a_saved_model_comes_back(tmp_path):
    plain = dsq.stash.measure(lambda: gpt(2)(input_ids=IDS, labels=IDS).loss).nbytes
    model, trainer = trained(tmp_path / "run", PrecisionCallback())
    assert dsq.stash.measure(lambda: model.train()(input_ids=IDS, labels=IDS).loss).nbytes < 0.4 * plain
    logged = trainer.state.log_history[0]
    assert logged["dsq/stash_bits"] == 4
    assert 0 < logged["dsq/stash_mib"] < plain / 2**20
    model.save_pretrained(tmp_path / "model")
    restored = restore(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model"))
    assert {str(layer.quantizers.precision) for layer in dsq.converted(restored).values()} == {"[8,4,8,8]"}
    assert torch.equal(restored.eval()(IDS).logits, model.eval()(IDS).logits)
    with pytest.raises(ValueError, match=r"config.json of the model has no 'dsq'"):
        restore(gpt(2))


def test_torch_compile_is_made_again_once_a_level(tmp_path, fresh_compiler):
    runs = []
    for options in ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, {}):
        callback = PrecisionCallback("[8,4,4,8] [8,5,5,8]", rise_at=2)
        log = trained(tmp_path, callback, blocks=1, **options)[1].state.log_history
        assert [line["dsq/level"] for line in log if "loss" in line] == [0, 1, 1, 1]  # after the update
        runs.append([line["loss"] for line in log if "loss" in line])
    assert runs[0] == pytest.approx(runs[1], rel=1e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]  # each would trace every frame around it anew


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_torch_compile_packs_what_its_graph_saves(tmp_path, fresh_compiler, monkeypatch, mode):
    compilations = []

    def compile_divided(model, backend, options=None, mode=None, **keywords):
        compilations.append((backend, options, mode))
        return compile_(model, backend=divided, options=options, **keywords)

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", compile_divided)
    options = {"torch_compile": True, "torch_compile_mode": mode, "bf16": True}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "compiled graphs save")
        model, trainer = trained(tmp_path, PrecisionCallback(), blocks=1, **options)
    policy, log = applied(model)["bfp"], trainer.state.log_history
    ((backend, of_inductor, other_mode),) = compilations
    assert (backend, of_inductor["custom_partitioner_fn"], other_mode) == ("inductor", policy.partitioner, None)
    assert of_inductor.get("triton.cudagraphs", False) == (mode is not None)
    assert sum(t.saved_bytes for t in policy.partitioner.graphs[0]) < 0.5 * sum(
        t.raw_bytes for t in policy.partitioner.graphs[0]
    )
    plugin = trainer.accelerator.state.dynamo_plugin  # as it was, for another trainer
    assert (plugin.mode, plugin.options) == (mode or "default", None)
    eager = trained(tmp_path, PrecisionCallback(), blocks=1, bf16=True)[1].state.log_history
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (log, eager)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_a_model_that_is_compiled_before_the_callback_sees_it_is_refused(tmp_path):
    options = arguments(tmp_path, max_steps=1, torch_compile=True, torch_compile_backend="aot_eager")
    whole, linears = PrecisionCallback(), PrecisionCallback("[8,4,4,8]", stash="linears")  # which is traced sooner
    makes = [(whole, lambda: gpt(1)), (linears, lambda: dsq.convert(gpt(1), linears.config))]
    plain, converted = (
        transformers.Trainer(args=options, model_init=make, train_dataset=ROWS, callbacks=[callback])
        for callback, make in makes
    )
    with pytest.raises(ValueError, match=r"let model_init return dsq.convert\(model, callback.config\)"):
        plain.train()
    assert converted.train().training_loss > 0


def test_trl_trains_with_the_same_line(tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2")
    options = arguments(tmp_path, trl.SFTConfig, max_steps=2, bf16=False, max_length=16)
    model, data = gpt(2), datasets.Dataset.from_dict({"input_ids": IDS.tolist()})
    trainer = trl.SFTTrainer(
        model, options, train_dataset=data, processing_class=tokenizer, callbacks=[PrecisionCallback()]
    )
    trainer.train()
    assert trainer.state.log_history[0]["dsq/stash_mib"] > 0
    assert len(dsq.converted(model)) == 8


def llama():
    torch.manual_seed(0)
    return transformer("llama", 32, 2, 2, words=64, tie_word_embeddings=False)[0]


def with_lora(model):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.train()


def loss(model):
    ids = torch.arange(64).view(2, 32) % 50
    return model(input_ids=ids, labels=ids).loss


def test_adapters_stay_plain_unless_asked():
    plain, asked = (
        dsq.convert(with_lora(llama()), dsq.DSQConfig(adapters=adapters, stash="linears")) for adapters in (False, True)
    )
    assert not [name for name in dsq.converted(plain) if "lora" in name]
    assert len([name for name in dsq.converted(plain) if name.endswith("q_proj.base_layer")]) == 2
    assert len([name for name in dsq.converted(asked) if "lora" in name]) == 8
    assert set(dsq.converted(asked)) > set(dsq.converted(plain))


def test_lora_on_a_converted_base_is_a_converted_lora():
    config = dsq.DSQConfig("[4,4,4,16]", stash="all")
    before, after = with_lora(dsq.convert(llama(), config)), dsq.convert(with_lora(llama()), config)
    for model in (before, after):
        loss(model).backward()
    assert set(dsq.converted(before)) == set(dsq.converted(after))
    pairs = zip(before.named_parameters(), after.named_parameters(), strict=True)
    trained = [(name, p.grad, q.grad) for (name, p), (_, q) in pairs if p.requires_grad]
    assert len(trained) == 8
    assert all("lora" in name and torch.equal(p, q) for name, p, q in trained)
