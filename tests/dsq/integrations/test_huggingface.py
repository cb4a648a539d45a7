"""The callback in a real Trainer: the level rises, is saved, and a resumed run equals an unbroken one."""

import pytest
import torch

import dsq

transformers = pytest.importorskip("transformers", reason="the callback needs transformers, which is not installed")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.ids = torch.randint(0, 50, (count, 12), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": int(self.ids[i, 0] > 25)}


class Logger(transformers.TrainerCallback):
    """As TensorBoard's callback: it stands in the list before a user's."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.lines.append(dict(logs))


def trained(folder, steps, resume=False):
    from dsq.integrations.huggingface import PrecisionCallback

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=8, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=4, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-3,
        lr_scheduler_type="constant",
    )  # fmt: skip
    callback, logger = PrecisionCallback("[4,4,4,16] [16,4,4,16]", patience=1, threshold=0.5), Logger()
    model = transformers.BertForSequenceClassification(config)
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(64), eval_dataset=Rows(16), callbacks=[logger])
    callback.add_to(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return model, callback, logger.lines


def test_a_resumed_run_equals_an_unbroken_one(tmp_path):
    whole, callback, _ = trained(tmp_path / "whole", 8)
    assert callback.dynamic.scheduler.level == 1
    assert {str(layer.quantizers.precision) for layer in dsq.converted(whole).values()} == {"[16,4,4,16]"}
    trained(tmp_path / "broken", 4)
    resumed, callback, _ = trained(tmp_path / "broken", 8, resume=True)
    assert [work.updates for work in callback.dynamic.scheduler.work] == [4, 4]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_loggers_see_level_and_stash(tmp_path):
    model, _, lines = trained(tmp_path, 6)
    levels = [line["dsq/level"] for line in lines]
    assert levels[0] == 0
    assert levels[-1] == 1
    rows = [Rows(8)[i] for i in range(8)]
    batch = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
    dsq.set_level(model, dsq.DSQConfig("[4,4,4,16]"), 0)
    names = dsq.converted(model)
    held = dsq.stash.measure(lambda: model.train()(**batch).loss).held
    nbytes = sum(h.nbytes for h in held if h.module in names and h.dtype == "uint8")
    assert lines[-1]["dsq/stash_mib"] * 2**20 == nbytes
    assert 0.05 < lines[-1]["dsq/stash_error"] < 0.15


def test_a_saved_model_comes_back_converted(tmp_path):
    from dsq.integrations.huggingface import restore

    model, _, _ = trained(tmp_path / "run", 6)
    model.save_pretrained(tmp_path / "model")
    again = restore(transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model"))
    assert {str(layer.quantizers.precision) for layer in dsq.converted(again).values()} == {"[16,4,4,16]"}
    ids = torch.arange(12)[None]
    assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
    with pytest.raises(ValueError, match=r"config.json of the model has no 'dsq'"):
        restore(transformers.BertForSequenceClassification(transformers.BertConfig(num_hidden_layers=1)))
