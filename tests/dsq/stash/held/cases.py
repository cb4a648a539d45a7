"""Small models under every policy and composition, and what a counted process says of each: run as a module, JSON."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.models import EncoderBlock, encoder, resnet20
from dsq import stash
from tests.allocator import step_bytes

Policies = tuple[tuple[str, dict[str, Any]], ...]


class Vit(nn.Module):
    """Patches, a class token, encoder blocks, the class token's row to a classifier."""

    def __init__(self, width: int = 96, blocks: int = 2, fused: bool = True) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.zeros(1, 65, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, 4, 4 * width, sdpa=fused) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def _classes(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    y = torch.arange(len(x)) % 10
    return lambda: F.cross_entropy(model(x), y)


def _loss_that_keeps_nothing(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """A loss whose gradient is random: F.mse_loss keeps the model's output, and its result lies in memory of that size
    too (PyTorch 2.13, CPU)."""
    with torch.no_grad():
        weights = torch.randn_like(model(x))
    return lambda: (model(x) * weights).sum()


def _encoder() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, x = encoder(2, 128, 4, 512), torch.randn(8, 96, 128)
    return model, _loss_that_keeps_nothing(model, x)


def _dropout() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, x = encoder(2, 128, 4, 512, dropout=0.1), torch.randn(8, 96, 128)
    return model, _loss_that_keeps_nothing(model, x)


def _autocast() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, loss = _encoder()

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss()

    return model, forward


def _compiled() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, forward = _encoder()
    for block in model.children():
        block.compile(backend="aot_eager_decomp_partition")
    return model, forward


def _graph() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, x = encoder(2, 128, 4, 512), torch.randn(8, 96, 128)
    compiled: Any = torch.compile(model, fullgraph=True)
    return compiled, _loss_that_keeps_nothing(compiled, x)


def _vit() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = Vit()
    return model, _classes(model, torch.randn(16, 3, 32, 32))


def _resnet() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = resnet20((16, 32, 64))
    return model, _classes(model, torch.randn(16, 3, 32, 32))


def _language_model(kind: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    import transformers

    sizes = {"vocab_size": 200, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "bert":
        config = transformers.BertConfig(**sizes, intermediate_size=384, max_position_embeddings=64)
        model: nn.Module = transformers.BertForSequenceClassification(config)
    elif kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=200, n_embd=96, n_layer=2, n_head=4, n_positions=64)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(**sizes, intermediate_size=256, max_position_embeddings=64)
        model = transformers.LlamaForCausalLM(config)
    model.config.use_cache = False
    words = torch.randint(200, (16, 64))
    if kind == "bert":
        return model, lambda: model(input_ids=words, labels=words[:, 0] % 2).loss
    return model, lambda: model(input_ids=words, labels=words).loss


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[], Tensor]]]] = {
    "encoder": _encoder,
    "dropout": _dropout,
    "autocast": _autocast,
    "compiled": _compiled,
    "graph": _graph,
    "vit": _vit,
    "resnet": _resnet,
    "bert": lambda: _language_model("bert"),
    "gpt2": lambda: _language_model("gpt2"),
    "llama": lambda: _language_model("llama"),
}


def _gact(**options: Any) -> tuple[str, dict[str, Any]]:
    return "gact", {"adapt_interval": None, **options}


_CHECKPOINT: tuple[str, dict[str, Any]] = ("checkpoint", {})
_SELECTIVE: tuple[str, dict[str, Any]] = ("selective", {})
_BFP: tuple[str, dict[str, Any]] = ("bfp", {})
_WTACRS: tuple[str, dict[str, Any]] = ("wtacrs", {})
_MESA: tuple[str, dict[str, Any]] = ("mesa", {})

POLICIES: dict[str, Policies] = {
    "plain": (),
    "bfp": (_BFP,),
    "bfp 2": (("bfp", {"bits": 2}),),
    "mesa": (_MESA,),
    "gact": (_gact(),),
    "gact 2": (_gact(bits=2),),
    "gact adapted": (("gact", {"adapt_interval": 100}),),
    "gact CB1": (_gact(level="CB1"),),
    "selective": (_SELECTIVE,),
    "wtacrs": (_WTACRS,),
    "checkpoint": (_CHECKPOINT,),
    "wtacrs + bfp": (_WTACRS, _BFP),
    "selective + bfp": (_SELECTIVE, _BFP),
    "checkpoint + bfp": (_CHECKPOINT, _BFP),
    "checkpoint + mesa": (_CHECKPOINT, _MESA),
    "checkpoint + selective": (_CHECKPOINT, _SELECTIVE),
    "checkpoint + wtacrs": (_CHECKPOINT, _WTACRS),
    "checkpoint + wtacrs + bfp": (_CHECKPOINT, _WTACRS, _BFP),
}


@dataclass(frozen=True)
class Claim:
    """What is said of a case, and what the allocator holds; bytes."""

    stash: int  #: held between forward and backward
    left: int  #: after the step, above what was held before it
    claimed_stash: int
    reported: dict[str, int]  #: kept_bytes of each policy's report


def claim(model_name: str, policies_name: str) -> Claim:
    """Train the case for a few steps and count one."""
    torch.manual_seed(0)
    model, forward = MODELS[model_name]()
    controllers = [stash.apply(model, name, **options) for name, options in POLICIES[policies_name]]
    held = step_bytes(forward)
    claimed = stash.measure(forward).nbytes
    reported = {controller.name: controller.report().kept_bytes for controller in controllers}
    return Claim(held.stash, held.left, claimed, reported)


def main(names: list[str]) -> None:
    """Print {"model/policies": claim, or the text of the error that came} as JSON."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = vars(claim(*name.split("/")))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
