"""Patches that fairseq 0.12.2 needs on today's Python and torch. Applied when this module is imported.

Import this before anything of fairseq, and in every process: workers that are spawned import it again.

1. Python 3.11 refuses fairseq's dataclasses: see startup.py.
2. torch.load reads only tensors and values, but fairseq's checkpoints hold a few classes more, and messages between
   its workers hold any class.
3. Encoder layers carry a second copy of their weights for PyTorch's fused encoder ("BetterTransformer"): eight dead
   parameters a layer. At generation the fused path bypasses every Linear, and crashes on padded batches.
4. --bf16 acts as --tpu.
5. Sinusoidal positions and adaptive layers save a number from uninitialized memory, so that equal checkpoints differ.
6. Options of models and optimizers, also those in checkpoints, go through eval: see evaluate.
7. Each run prints a screen of deprecation warnings that only fairseq could act on, and a hint to install tensorboardX.
"""

import argparse
import ast
import functools
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

from fairseq_plugin import bleu_counts, startup

startup.apply()
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # it logs when it is imported

import torch  # noqa: E402
from fairseq import checkpoint_utils, options  # noqa: E402
from fairseq.distributed import utils as distributed_utils  # noqa: E402
from fairseq.modules import AdaptiveInput, SinusoidalPositionalEmbedding  # noqa: E402
from fairseq.modules.adaptive_softmax import TiedHeadModule  # noqa: E402
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase  # noqa: E402

FUSED_PARAMETERS = tuple(
    f"{name}_{kind}" for name in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")
)


#: characters of a text that evaluate reads, and values and characters of a repetition in it
MAX_LENGTH = 10_000
_SEQUENCES = (str, bytes, list, tuple)


def evaluate(text: Any) -> Any:
    """Return the value of an expression of numbers, texts, lists and dictionaries, joined by +, - and *. No code runs.

    fairseq gives texts such as ``[(512, 3)] * 20``, which a checkpoint's model has too, to Python's eval. Raises
    TypeError if ``text`` is no text, as eval does, and ValueError if there is anything else in it, or if it is longer,
    or repeats more, than MAX_LENGTH.
    """
    if not isinstance(text, str):
        raise TypeError(f"a value must be given as text, got {text!r}")
    try:
        if len(text) <= MAX_LENGTH:
            return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, OverflowError, MemoryError, RecursionError):
        pass
    excerpt = f"{text!r:.100}"
    raise ValueError(f"a value must be made of numbers and lists, as in '[(512, 3)] * 2', and be short, got {excerpt}")


def _value(node: ast.AST | None) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.List():
            return [_value(element) for element in node.elts]
        case ast.Tuple():
            return tuple(_value(element) for element in node.elts)
        case ast.Dict():
            return {_value(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.BinOp(op=ast.Add()):
            return _value(node.left) + _value(node.right)
        case ast.BinOp(op=ast.Sub()):
            return _value(node.left) - _value(node.right)
        case ast.BinOp(op=ast.Mult()):
            return _product(_value(node.left), _value(node.right))
    raise ValueError


def _product(a: Any, b: Any) -> Any:
    for sequence, times in ((a, b), (b, a)):
        if isinstance(sequence, _SEQUENCES) and isinstance(times, int) and _length(sequence) * times > MAX_LENGTH:
            raise ValueError
    return a * b


def _length(value: Any) -> int:
    """Return how many values and characters ``value`` has, those of its elements included."""
    if isinstance(value, (str, bytes)):
        return max(len(value), 1)
    if isinstance(value, dict):
        return 1 + sum(map(_length, value.values()))
    return 1 + sum(map(_length, value)) if isinstance(value, (list, tuple)) else 1


def _loading_anything(function):
    """Return ``function``, in which torch.load reads any object: for messages between this run's own workers."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with mock.patch.object(torch, "load", functools.partial(torch.load, weights_only=False)):
            return function(*args, **kwargs)

    return call


def _after_init(module: type, action: Callable[[Any], None]) -> None:
    """Call ``action`` on each new ``module``."""
    init = module.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def build(self, *args, **kwargs):
        init(self, *args, **kwargs)
        action(self)

    module.__init__ = build  # type: ignore[misc]


def _drop_fused_copy(layer: TransformerEncoderLayerBase) -> None:
    layer.can_use_fastpath = False
    for name in FUSED_PARAMETERS:
        delattr(layer, name)


def _load_without_fused_copy(self, state_dict, prefix, *args):
    for name in FUSED_PARAMETERS:
        state_dict.pop(prefix + name, None)
    torch.nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


def _zero_memory(module: torch.nn.Module) -> None:
    module._float_tensor.zero_()  # type: ignore[operator]
    module.register_load_state_dict_pre_hook(_load_zero_memory)


def _load_zero_memory(_: object, state_dict: dict[str, torch.Tensor], prefix: str, *__: object) -> None:
    if prefix + "_float_tensor" in state_dict:  # of an old checkpoint, or from fairseq's upgrade of one
        state_dict[prefix + "_float_tensor"] = torch.zeros(1)


def _bf16_without_tpu(parse):
    @functools.wraps(parse)
    def parse_args_and_arch(*args, **kwargs):
        parsed = parse(*args, **kwargs)
        namespace = parsed[0] if isinstance(parsed, tuple) else parsed
        if getattr(namespace, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
            namespace.tpu = False
        return parsed

    return parse_args_and_arch


def silence_deprecations() -> None:
    """Hide deprecation warnings between fairseq, hydra and torch."""
    for module in (r"hydra\.", r"fairseq\.tasks\.fairseq_task", r"torch\.utils\.data\.dataloader"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", message=r"\s*'config' is validated against ConfigStore schema")
    warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask and attn_mask")


torch.serialization.add_safe_globals([argparse.Namespace])
for _name, _loaded in sys.modules.items():
    if _name.partition(".")[0] == "fairseq":
        vars(_loaded)["eval"] = evaluate  # found before Python's own
silence_deprecations()
_after_init(TransformerEncoderLayerBase, _drop_fused_copy)
TransformerEncoderLayerBase._load_from_state_dict = _load_without_fused_copy
for _module in (SinusoidalPositionalEmbedding, AdaptiveInput, TiedHeadModule):
    _after_init(_module, _zero_memory)
checkpoint_utils.load_checkpoint_to_cpu = bleu_counts.reading_counts(checkpoint_utils.load_checkpoint_to_cpu)
distributed_utils.broadcast_object = _loading_anything(distributed_utils.broadcast_object)
options.parse_args_and_arch = _bf16_without_tpu(options.parse_args_and_arch)
