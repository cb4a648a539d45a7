"""Values of fairseq's own flags that no run can use, refused when the command line is read."""

import argparse
import ast
import functools
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import torch
from fairseq.data.encoders import TOKENIZER_REGISTRY

from dsq.arguments import choice, number, whole_number
from dsq.command.files import check_writable
from fairseq_plugin import literals
from fairseq_plugin.flags import InputError
from fairseq_plugin.mistakes.texts import check_texts

_LAST = "checkpoint_last.pt"  # fairseq's default of --restore-file: it need not be there


def _patience(name: str, value: Any) -> None:
    if value == 0:
        raise ValueError(f"{name} must be a whole number from 1, or -1 for none, got 0")
    whole_number(name, value, -1)


def _validation_batch(name: str, value: Any) -> None:
    """A whole number, or its text, as fairseq reads it where the flag is given."""
    whole_number(name, int(value) if isinstance(value, str) and value.isdecimal() else value, 1)


def _layers(name: str, value: Any) -> None:
    """A number of layers; of the convolutional models, whose options are texts, each layer's width and kernel."""
    if not isinstance(value, str):
        whole_number(name, value, 1)
        return
    try:
        if all(len(layer) in (2, 3) for layer in literals.evaluate(value)):
            return
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{name} must be the width and kernel of each layer, as in '[(512, 3)] * 20', got {value!r}")


def _betas(name: str, value: Any) -> None:
    """Two numbers, which fairseq takes as a list or as the text of a pair."""
    try:
        betas = ast.literal_eval(value) if isinstance(value, str) else value
        for beta in (betas[0], betas[1]):
            number(name, beta, least=0, below=1)
    except (ValueError, SyntaxError, TypeError, IndexError):
        raise ValueError(f"{name} must be two numbers in [0, 1), as in '(0.9, 0.98)', got {value!r}") from None


def _dictionary(name: str, value: Any) -> None:
    """A dictionary in Python's or JSON's words; fairseq has read some by now."""
    try:
        if isinstance(ast.literal_eval(value) if isinstance(value, str) else value, dict):
            return
    except (ValueError, SyntaxError):
        pass
    raise ValueError(f"{name} must be a dictionary, as in '{{\"beam\": 4}}', got {value!r}")


def _file(name: str, value: str) -> None:
    if value and value != _LAST and not Path(value).is_file():
        raise ValueError(f"{name}: there is no file {value}")


def _output(name: str, value: str) -> None:
    try:
        check_writable(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _folder(name: str, value: str) -> None:
    try:
        Path(value).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name} {value}: {error.strerror}: give another directory") from None


def _data(name: str, value: str) -> None:
    for folder in value.split(":"):
        if not Path(folder).is_dir():
            why = "is no directory" if Path(folder).exists() else "does not exist"
            raise ValueError(f"{name}: {folder} {why}: give a directory that dsq-preprocess wrote")


_ACCEPTED: tuple[tuple[Callable[[str, Any], object], str], ...] = (
    (_data, "data"),
    (
        functools.partial(whole_number, least=1),
        """max_tokens batch_size beam nbest log_interval save_interval workers
        validate_interval update_freq encoder_embed_dim decoder_embed_dim encoder_ffn_embed_dim decoder_ffn_embed_dim
        encoder_attention_heads decoder_attention_heads max_source_positions max_target_positions padding_factor
        num_shards distributed_world_size required_batch_size_multiple tokens_per_sample
        max_valid_steps""",
    ),
    (
        functools.partial(whole_number, least=0),
        """num_workers seed save_interval_updates validate_interval_updates max_update max_epoch warmup_updates min_len
        prefix_size no_repeat_ngram_size thresholdsrc thresholdtgt data_buffer_size curriculum shard_id""",
    ),
    (
        functools.partial(whole_number, least=-1),
        """nwordssrc nwordstgt keep_interval_updates keep_last_epochs keep_best_checkpoints sampling_topk
        diverse_beam_groups""",
    ),
    (functools.partial(number, above=0, below=inf), "temperature adam_eps"),
    (functools.partial(number, least=0, below=inf), "lr clip_norm weight_decay max_len_a max_len_b stop_time_hours"),
    (
        functools.partial(number, least=0, below=1),
        """dropout attention_dropout activation_dropout relu_dropout label_smoothing encoder_layerdrop
        decoder_layerdrop quant_noise_pq quant_noise_scalar""",
    ),
    (functools.partial(number, above=-inf, below=inf), "lenpen unkpen stop_min_lr"),
    (functools.partial(number, above=-inf, most=1), "sampling_topp"),
    (functools.partial(choice, accepted=TOKENIZER_REGISTRY), "eval_bleu_detok"),
    (_validation_batch, "max_tokens_valid batch_size_valid"),
    (_layers, "encoder_layers decoder_layers"),
    (_patience, "patience"),
    (_betas, "adam_betas"),
    (_dictionary, "optimizer_overrides model_overrides eval_bleu_args"),
    (
        _file,
        "srcdict tgtdict alignfile encoder_embed_path decoder_embed_path finetune_from_model lm_path restore_file",
    ),
    (_output, "log_file"),
    (_folder, "results_path"),
)
#: the name of an option -> what raises ValueError, in a line that begins with the name, for a value that no run can use
LIMITS = {name: check for check, names in _ACCEPTED for name in names.split()}


def strict(get_parser: Callable[..., argparse.ArgumentParser]) -> Callable[..., argparse.ArgumentParser]:
    """fairseq's ``get_parser``, whose parser raises InputError for values that no run can use."""

    @functools.wraps(get_parser)
    def get(*args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        parser = get_parser(*args, **kwargs)
        parse = parser.parse_args

        def parse_args(*arguments: Any, **names: Any) -> argparse.Namespace:
            given = parse(*arguments, **names)
            check(given)
            return given

        parser.parse_args = parse_args  # type: ignore[assignment,method-assign]
        return parser

    return get


def require_architecture(parser: argparse.ArgumentParser) -> None:
    """Have the parser of a training say that --arch is missing."""
    for action in parser._actions:
        action.required |= action.dest == "arch"


def check(options: argparse.Namespace) -> None:
    """Raise InputError, naming the flag and the accepted form, for values that no command of fairseq's can use."""
    for name, accept in LIMITS.items():
        value = getattr(options, name, None)
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                _check_one(name, one, accept)
    for missing in _mistakes_together(options):
        raise InputError(missing)
    if "trainpref" in options:
        check_texts(options)


def _check_one(name: str, value: Any, accept: Callable[[str, Any], object]) -> None:
    try:
        accept(name, value)
    except ValueError as error:
        flag = name if name == "data" else "--" + name.replace("_", "-")
        raise InputError(flag + str(error).removeprefix(name)) from None


def _mistakes_together(options: argparse.Namespace) -> Iterator[str]:
    """What is missing, and options that do not go with each other, a line each."""
    source, target = (getattr(options, f"{side}_lang", None) for side in ("source", "target"))
    if "trainpref" not in options and (source is None) != (target is None):
        yield "--source-lang and --target-lang go together: give both, or none"
    if "clip_norm" in options:  # of a training
        if not getattr(options, "data", "."):
            yield "data is missing: give a directory that dsq-preprocess wrote"
        if not options.optimizer:
            yield "--optimizer is missing: give an optimizer, as --optimizer adam"
        if options.max_tokens is None and options.batch_size is None:
            yield "--max-tokens and --batch-size are missing: give the size of a batch by one of them"
        if options.distributed_init_method and not options.distributed_no_spawn and not torch.cuda.device_count():
            yield "--distributed-init-method: fairseq starts a worker for each GPU, and there is none: use torchrun"
        if not options.save_dir:
            yield "--save-dir must be a directory, got ''"
    if "path" in options and "beam" in options:  # of a generation
        if not options.path:
            yield "--path is missing: give a checkpoint that dsq-train wrote"
        for path in filter(lambda path: Path(path).is_dir(), options.path.split(":")):
            yield f"--path: {path} is a directory: give a checkpoint that dsq-train wrote"
        if options.nbest > options.beam:
            yield f"--nbest must be --beam, {options.beam}, at most, got {options.nbest}"
        if options.shard_id >= options.num_shards:
            yield f"--shard-id must be below --num-shards, {options.num_shards}, got {options.shard_id}"
