"""One small training run, and the same in each trainer: model, batches, loss and schedule."""

import torch
from torch import nn
from torch.nn import functional as F

import dsq

BATCH, EVERY, HALF, UPDATES = 8, 2, 4, 8  # validation after every EVERY updates; HALF of them are an epoch
LEVELS = "[4,4,4,16] [16,4,4,16]"
#: rises at the second validation: no loss halves
OPTIONS = {"levels": LEVELS, "patience": 1, "threshold": 0.5, "stash": "all"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x, labels):
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset):
    """Rows of numbers, each labelled by its largest among the first four."""

    def __init__(self, count, seed):
        self.x = torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.x[i, :4].argmax()}


def loader(training):
    rows = Rows(BATCH * HALF, 1) if training else Rows(BATCH, 2)
    return torch.utils.data.DataLoader(rows, BATCH)


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def config():
    return dsq.DSQConfig(**OPTIONS)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def updates_from(done, until, batches):
    """(its number, its batch) of each update after ``done``, epoch after epoch."""
    for epoch in range(UPDATES // HALF):
        for update, batch in enumerate(batches, 1 + epoch * HALF):
            if done < update <= until:
                yield update, batch


def validate(model, dynamic):
    """Tell ``dynamic`` the validation loss of ``model``, which may be wrapped by a trainer."""
    model.eval()
    with torch.no_grad():
        dynamic.step(float(model(**next(iter(loader(False))))["loss"]))
    model.train()


def plain_loop(until=UPDATES, saved=None):
    """Model, its precision, and the state that a checkpoint holds, after ``until`` updates."""
    model = Net()
    dynamic = dsq.DynamicPrecision(model, config())
    optimise = optimizer(model)
    start = 0
    if saved:
        model.load_state_dict(saved["model"])
        optimise.load_state_dict(saved["optimizer"])
        dynamic.load_state_dict(saved["dsq"])
        start = saved["update"]
    for update, batch in updates_from(start, until, loader(True)):
        optimise.zero_grad()
        model(**batch)["loss"].backward()
        optimise.step()
        dynamic.record()
        if update % EVERY == 0:
            validate(model, dynamic)
    state = {"model": model.state_dict(), "optimizer": optimise.state_dict(), "dsq": dynamic.state_dict()}
    return model, dynamic, state | {"update": until}
