"""A GPT of 124 million parameters trained on a GPU, eager and as a CUDA graph; what it waits for.

That models learn: `python -m analysis.evidence run --device cuda`.
"""

import copy
import gc
import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing import Manager
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import dsq
from analysis.gpu import Machine, Trial, captured
from analysis.gpu.llama import Llama
from analysis.models import GPT, attach
from dsq.command import Record
from dsq.kernels.dispatch import use_backend
from dsq.kernels.triton.backend import TRITON
from dsq.precision import DEFAULT_LEVELS

LEVELS = (str(DEFAULT_LEVELS[0]), "[4,3,3,8]")


class Size(NamedTuple):
    vocabulary: int
    tokens: int  #: of a sequence
    width: int
    blocks: int
    heads: int
    batch: int
    family: type[GPT | Llama] = GPT


GPT2 = Size(50304, 1024, 768, 12, 12, 8)  # 124 million parameters
LARGE = Size(50304, 1024, 2048, 24, 16, 8)  # 1.3 billion, whose kernels take longer than the host takes to launch them
LLAMA = Size(128256, 4096, 4096, 32, 32, 4, Llama)  # Llama-3-8B
TINY = Size(64, 16, 32, 2, 2, 2)


def setups(machine: Machine) -> dict[str, str]:
    """Name -> that of analysis/models.py; torchao's float8 if it is installed and the GPU has it."""
    names = {"fp32": "fp32", "bf16": "autocast", "bf16, checkpoints": "around checkpoint + autocast"}
    for level in LEVELS if machine.is_gpu else LEVELS[:1]:
        names[f"dsq {level}, linears"] = f"{level} + autocast"
        names[f"dsq {level}, all"] = f"{level} all + autocast"
    names[f"dsq {LEVELS[0]}, all, checkpoints"] = f"{LEVELS[0]} all + around checkpoint + autocast"
    if machine.is_gpu and importlib.util.find_spec("torchao") and torch.cuda.get_device_capability() >= (8, 9):
        names["torchao float8"] = "float8 + autocast"
    return names


class Step:
    """Forward, backward and an update of one batch, always the same, of a model under a setup (analysis/models.py).

    A step of compiled blocks compiles its loss too. A model in bfloat16 runs without autocast.
    """

    def __init__(self, machine: Machine, setup: str, size: Size, batch: int | None = None) -> None:
        torch.manual_seed(0)
        with machine.device:
            self.model = size.family(*size[:5], dropout=0.0)
        attach(self.model, setup)
        shape = batch or size.batch, size.tokens + 1
        self.tokens = torch.randint(size.vocabulary, shape, generator=torch.Generator().manual_seed(0))
        self.tokens = self.tokens.to(machine.device)
        on_gpu = {"fused": machine.is_gpu, "capturable": machine.is_gpu}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-4, **on_gpu)  # type: ignore[arg-type]
        casts = "autocast" in setup and self.model.head.weight.dtype is torch.float32
        self.autocast = torch.autocast(machine.device.type, torch.bfloat16, enabled=casts)
        self.compiled_loss = torch.compile(_loss_of_hidden) if "compiled" in setup else None

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        inputs, targets = self.tokens[:, :-1], self.tokens[:, 1:]
        with self.autocast:  # no variable keeps the logits, which are much of the peak, until the backward
            if self.compiled_loss is None:
                loss = F.cross_entropy(self.model(inputs).flatten(0, 1).float(), targets.flatten())
            else:
                loss = self.compiled_loss(self.model(inputs, logits=False), self.model.head.weight, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _loss_of_hidden(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_BTD, weight_VD).flatten(0, 1).float(), targets_BT.flatten())


def steps(machine: Machine) -> Iterator[Trial]:
    """A row a setup: tokens a second and the peak that the allocator held."""
    names = setups(machine)
    for name, setup in names.items():
        yield Trial(name, partial(measured_step, machine, setup, GPT2 if machine.is_gpu else TINY))
    for name in ("bf16", "bf16, checkpoints", *(it for it in names if LEVELS[0] in it)):
        if machine.is_gpu:
            yield Trial(f"{name}, 1.3 billion", partial(measured_step, machine, names[name], LARGE))


def measured_step(machine: Machine, setup: str, size: Size) -> Record:
    """Return the time of a step, and on a GPU its peak memory."""
    gc.collect()  # what a trial before kept would count
    with use_backend(TRITON, machine.device.type):
        step = Step(machine, setup, size)
        duration = machine.milliseconds({"step": step})["step"]
        row = {"ms": round(duration, 2), "tokens/s": round(1000 * size.batch * size.tokens / duration)}
        if machine.is_gpu:
            torch.cuda.reset_peak_memory_stats()
            step()
            row["peak MiB"] = round(torch.cuda.max_memory_allocated() / 2**20)
        return row


def largest_batches(machine: Machine) -> Iterator[Trial]:
    """The largest batch of the GPT that fits the card, by doubling and then by halves."""
    return (Trial(name, partial(_largest, machine, name)) for name in setups(machine) if name != "fp32")


def _largest(machine: Machine, name: str) -> Record:
    size, fits, fails = (GPT2, 4, 4096) if machine.is_gpu else (TINY, 1, 2)
    while fails - fits > max(fits // 8, 1):
        trial = min(2 * fits, (fits + fails) // 2)
        try:
            with use_backend(TRITON, machine.device.type):
                Step(machine, setups(machine)[name], size, trial)()
            fits = trial
        except torch.cuda.OutOfMemoryError:
            fails = trial
        torch.cuda.empty_cache()
    return {"batch": fits, "tokens": fits * size.tokens}


def graphs(machine: Machine) -> Iterator[Trial]:
    """Whether a step waits for the device, and whether it runs as a CUDA graph, whose replays draw new numbers."""
    for name in setups(machine):
        yield Trial(f"{name}: waits", partial(_waits, machine, name))
        yield Trial(f"{name}: graph", partial(_replayed, machine, name))


def _waits(machine: Machine, name: str) -> Record:
    with use_backend(TRITON, machine.device.type):
        step = Step(machine, setups(machine)[name], TINY)
        for _ in range(3):
            step()
        if machine.is_gpu:
            torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            if machine.is_gpu:
                torch.cuda.set_sync_debug_mode("default")
    return {"waits": ""}


def _replayed(machine: Machine, name: str) -> Record:
    size = GPT2 if machine.is_gpu else TINY
    with use_backend(TRITON, machine.device.type):
        step = Step(machine, setups(machine)[name], size)
        if not machine.is_gpu:
            return {"ms": None, "first loss": float(step()), "later loss": float(step())}
        for _ in range(2):
            step()
        losses: list[Tensor] = []  # the last one is the graph's own
        graph = captured([lambda: losses.append(step())])
        graph.replay()
        first = float(losses[-1])
        duration = machine.milliseconds({"graph": graph.replay})["graph"]
        return {"ms": round(duration, 2), "first loss": first, "later loss": float(losses[-1])}


def two_devices(machine: Machine) -> Iterator[Trial]:
    """Two processes of DDP over NCCL: the gradients of both are one."""
    if machine.is_gpu and torch.cuda.device_count() > 1:
        yield Trial("DDP over NCCL", _ddp)


def _ddp() -> Record:
    with Manager() as manager:
        sums = manager.dict()
        spawn(_ddp_process, (sums,), nprocs=2)
        return {"disagree": "" if sums[0] == sums[1] else "gradients of the two devices"}


def _ddp_process(rank: int, sums: dict[int, float]) -> None:
    torch.distributed.init_process_group("nccl", init_method="tcp://127.0.0.1:29517", rank=rank, world_size=2)
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = GPT(*TINY[:5], dropout=0.0)
    dsq.convert(model, dsq.DSQConfig(levels=LEVELS[0], stash="all"))
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model).to(rank))
    wrapped(torch.randint(TINY.vocabulary, (2, TINY.tokens), device=rank)).float().square().mean().backward()
    sums[rank] = sum(float(p.grad.double().sum()) for p in wrapped.parameters() if p.grad is not None)
    torch.distributed.destroy_process_group()
