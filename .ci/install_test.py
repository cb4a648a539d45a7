"""The first steps of a user with the installed package: .ci/install-test README.md."""

import copy
import csv
import re
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import dsq

IDS = torch.arange(256).view(16, 16) % 64


def gpt():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))


def readme(page):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", Path(page).read_text(), re.S):
        exec(block, names)
    return names["dynamic"]


def hugging_face(**options):
    from transformers import Trainer, TrainingArguments

    from dsq.integrations.huggingface import PrecisionCallback, restore

    arguments = TrainingArguments(
        "hf", **{"max_steps": 2} | options, logging_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        disable_tqdm=True, save_steps=2,
    )  # fmt: skip
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
    trainer = Trainer(gpt(), arguments, train_dataset=rows, callbacks=[PrecisionCallback()])
    trainer.train(resume_from_checkpoint=options.get("max_steps", 2) > 2)
    assert trainer.state.log_history[0]["dsq/stash_bits"] == 4
    trainer.save_model("saved")
    restore(type(trainer.model).from_pretrained("saved"))


def trl():
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from dsq.integrations.huggingface import PrecisionCallback

    words = Tokenizer(WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2")
    arguments = SFTConfig("trl", max_steps=1, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, max_length=16)
    data = Dataset.from_dict({"input_ids": IDS.tolist()})
    SFTTrainer(
        gpt(), arguments, train_dataset=data, processing_class=tokenizer, callbacks=[PrecisionCallback()]
    ).train()


def lightning():
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    from dsq.integrations.lightning import PrecisionCallback

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))

        def training_step(self, x):
            return self.net(x).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logger = CSVLogger("csv", flush_logs_every_n_steps=1)
    trainer = Trainer(
        max_steps=3, logger=logger, log_every_n_steps=1, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, callbacks=[PrecisionCallback()],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(48, 32), 16))
    with open(f"{logger.log_dir}/metrics.csv") as file:
        row = list(csv.DictReader(file))[-1]
    assert float(row["dsq/stash_bits"]) == 4
    assert float(row["dsq/stash_mib"]) > 0


def accelerate():
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    dynamic = dsq.DynamicPrecision(model)
    accelerator.register_for_checkpointing(dynamic)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.randn(16, 32)).square().mean())
    optimizer.step()
    dynamic.record()
    accelerator.save_state("state")
    accelerator.load_state("state")


def compiled_and_exported():
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(64, 32)
    dsq.DynamicPrecision(model)
    compiled = torch.compile(model, fullgraph=True)
    compiled(x).sum().backward()
    exported = torch.export.export(dsq.unconvert(model).eval(), (x,))
    assert torch.allclose(exported.module()(x), model(x), atol=1e-5)


def resumed(dynamic):
    weights, _, schedule = torch.load("checkpoint.pt")
    model = copy.deepcopy(dynamic.model)
    again = dsq.DynamicPrecision(model)
    model.load_state_dict(weights)
    again.load_state_dict(schedule)
    assert again.state_dict() == dynamic.state_dict()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    resumed(readme(sys.argv[1]))
    for step in (accelerate, hugging_face, lambda: hugging_face(max_steps=4), trl, lightning, compiled_and_exported):
        step()
    print("the install test passes")
