"""The callback in a real Trainer: the level rises, is saved, and a resumed run equals an unbroken one."""

import pytest
import torch

import dsq

transformers = pytest.importorskip("transformers", reason="the callback needs transformers, which is not installed")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")


@pytest.fixture(autouse=True)
def _what_may_be_unpickled_stays():
    before = torch.serialization.get_safe_globals()  # the Trainer clears them
    yield
    torch.serialization.add_safe_globals(before)


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.ids = torch.randint(0, 50, (count, 12), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": int(self.ids[i, 0] > 25)}


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
    callback = PrecisionCallback("[4,4,4,16] [16,4,4,16]", patience=1, threshold=0.5)
    model = transformers.BertForSequenceClassification(config)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Rows(64), eval_dataset=Rows(16), callbacks=[callback]
    )
    trainer.train(resume_from_checkpoint=resume)
    return model, callback


def test_a_resumed_run_equals_an_unbroken_one(tmp_path):
    whole, callback = trained(tmp_path / "whole", 8)
    assert callback.dynamic.scheduler.level == 1
    assert {str(layer.quantizers.precision) for layer in dsq.converted(whole).values()} == {"[16,4,4,16]"}
    trained(tmp_path / "broken", 4)
    resumed, callback = trained(tmp_path / "broken", 8, resume=True)
    assert [work.updates for work in callback.dynamic.scheduler.work] == [4, 4]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
