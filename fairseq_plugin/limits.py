"""Values of fairseq's own flags that no run can use, refused when the command line is read."""

import argparse
import ast
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq.data.encoders import TOKENIZER_REGISTRY

from dsq.arguments import choice, number, whole_number
from dsq.command.files import check_writable
from fairseq_plugin.flags import InputError

_AT_LEAST_1 = """max_tokens max_tokens_valid batch_size batch_size_valid beam nbest log_interval save_interval
validate_interval update_freq encoder_embed_dim decoder_embed_dim encoder_ffn_embed_dim decoder_ffn_embed_dim
encoder_attention_heads decoder_attention_heads max_source_positions max_target_positions padding_factor workers
encoder_layers decoder_layers num_shards distributed_world_size required_batch_size_multiple tokens_per_sample
max_valid_steps"""
_AT_LEAST_0 = """num_workers seed save_interval_updates validate_interval_updates max_update max_epoch warmup_updates
min_len prefix_size no_repeat_ngram_size thresholdsrc thresholdtgt data_buffer_size
curriculum shard_id"""
_AT_LEAST_MINUS_1 = """nwordssrc nwordstgt keep_interval_updates keep_last_epochs keep_best_checkpoints sampling_topk
diverse_beam_groups"""
_POSITIVE = "temperature adam_eps"
_NOT_NEGATIVE = "lr clip_norm weight_decay max_len_a max_len_b stop_time_hours"
_FRACTIONS = """dropout attention_dropout activation_dropout relu_dropout label_smoothing encoder_layerdrop
decoder_layerdrop quant_noise_pq quant_noise_scalar"""
_FINITE = "lenpen unkpen stop_min_lr"


def _patience(name: str, value: Any) -> int:
    if value == 0:
        raise ValueError(f"{name} must be a whole number from 1, or -1 for none, got 0")
    return whole_number(name, value, -1)


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


def _detokenizer(name: str, value: Any) -> None:
    choice(name, value, TOKENIZER_REGISTRY)


def _each(names: str, check: Callable[[str, Any], object]) -> dict[str, Callable[[str, Any], object]]:
    return dict.fromkeys(names.split(), check)


#: the name of an option -> what raises ValueError for a value out of its range
LIMITS: dict[str, Callable[[str, Any], object]] = {
    **_each(_AT_LEAST_1, functools.partial(whole_number, least=1)),
    **_each(_AT_LEAST_0, functools.partial(whole_number, least=0)),
    **_each(_AT_LEAST_MINUS_1, functools.partial(whole_number, least=-1)),
    **_each(_POSITIVE, functools.partial(number, above=0, below=math.inf)),
    **_each(_NOT_NEGATIVE, functools.partial(number, least=0, below=math.inf)),
    **_each(_FRACTIONS, functools.partial(number, least=0, below=1)),
    **_each(_FINITE, functools.partial(number, above=-math.inf, below=math.inf)),
    "patience": _patience,
    "adam_betas": _betas,
    "optimizer_overrides": _dictionary,
    "model_overrides": _dictionary,
    "eval_bleu_args": _dictionary,
    "eval_bleu_detok": _detokenizer,
    "sampling_topp": functools.partial(number, above=-math.inf, most=1),
}

#: options that name files which have to be there
_FILES = (
    "srcdict",
    "tgtdict",
    "alignfile",
    "encoder_embed_path",
    "decoder_embed_path",
    "finetune_from_model",
    "lm_path",
)
_LAST = "checkpoint_last.pt"  # fairseq's default of --restore-file: it need not be there


def strict(get_parser: Callable[..., argparse.ArgumentParser]) -> Callable[..., argparse.ArgumentParser]:
    """``get_parser``, of fairseq's commands, with a parser that refuses what is out of its range by InputError."""

    @functools.wraps(get_parser)
    def get(*args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        parser = get_parser(*args, **kwargs)
        parse = parser.parse_args

        def parse_args(*arguments: Any, **names: Any) -> argparse.Namespace:
            given = parse(*arguments, **names)
            check(vars(given))
            return given

        parser.parse_args = parse_args  # type: ignore[assignment,method-assign]
        return parser

    return get


def require_architecture(parser: argparse.ArgumentParser) -> None:
    """Have the parser of a training say that --arch is missing."""
    for action in parser._actions:
        action.required |= action.dest == "arch"


def check(options: dict[str, Any]) -> None:
    """Raise InputError, naming the flag and the accepted form, for values that no command of fairseq's can use."""
    for name in LIMITS.keys() & options.keys():
        values = options[name] if isinstance(options[name], list) else [options[name]]
        for value in values:
            if value is not None:
                _check_one(name, value)
    for name in _FILES:
        _check_file(name, options.get(name))
    if options.get("restore_file") != _LAST:
        _check_file("restore_file", options.get("restore_file"))
    if "trainpref" not in options and (options.get("source_lang") is None) != (options.get("target_lang") is None):
        raise InputError("--source-lang and --target-lang go together: give both, or none")
    if options.get("log_file"):
        _check_output("log_file", options["log_file"])
    if "clip_norm" in options:  # of a training
        _check_training(options)
    if "path" in options and "beam" in options:
        _check_generation(options)
    if "trainpref" in options:
        _check_preprocessing(options)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-") if name != "data" else name


def _check_one(name: str, value: Any) -> None:
    try:
        LIMITS[name](name, value)
    except ValueError as error:
        raise InputError(f"{_flag(name)}{str(error).removeprefix(name)}") from None


def _check_file(name: str, value: Any) -> None:
    if value and not Path(value).is_file():
        raise InputError(f"{_flag(name)}: there is no file {value}")


def _check_output(name: str, value: str) -> None:
    try:
        check_writable(value)
    except ValueError as error:
        raise InputError(f"{_flag(name)}: {error}") from None


def _check_data(value: str | None) -> None:
    if not value:
        raise InputError("data is missing: give a directory that dsq-preprocess wrote")
    for folder in value.split(":"):
        if not Path(folder).is_dir():
            why = "is no directory" if Path(folder).exists() else "does not exist"
            raise InputError(f"data: {folder} {why}: give a directory that dsq-preprocess wrote")


def _check_training(options: dict[str, Any]) -> None:
    _check_data(options.get("data", "."))
    if not options["optimizer"]:
        raise InputError("--optimizer is missing: give an optimizer, as --optimizer adam")
    if options.get("max_tokens") is None and options.get("batch_size") is None:
        raise InputError("--max-tokens and --batch-size are missing: give the size of a batch by one of them")
    if not options["save_dir"]:
        raise InputError("--save-dir must be a directory, got ''")


def _check_generation(options: dict[str, Any]) -> None:
    if not options["path"]:
        raise InputError("--path is missing: give a checkpoint that dsq-train wrote")
    for path in options["path"].split(":"):
        if Path(path).is_dir():
            raise InputError(f"--path: {path} is a directory: give a checkpoint that dsq-train wrote")
    if options["nbest"] > options["beam"]:
        raise InputError(f"--nbest must be --beam, {options['beam']}, at most, got {options['nbest']}")
    if options["shard_id"] >= options["num_shards"]:
        raise InputError(f"--shard-id must be below --num-shards, {options['num_shards']}, got {options['shard_id']}")
    _check_data(options.get("data", "."))
    if options.get("results_path"):
        try:
            Path(options["results_path"]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--results-path {options['results_path']}: {error.strerror}: give another directory"
            ) from None


def _check_preprocessing(options: dict[str, Any]) -> None:
    """Raises also for parallel texts that have no line for each other's, and for texts that are empty or no UTF-8."""
    if not options["source_lang"] and not options["only_source"]:
        raise InputError("--source-lang is missing: give the suffix of the source's texts")
    if not options["target_lang"] and not options["only_source"]:
        raise InputError("--target-lang is missing: give the suffix of the target's texts, or --only-source")
    if options["source_lang"] == options["target_lang"] and not options["only_source"]:
        raise InputError(f"--target-lang must be another than --source-lang, got {options['target_lang']} for both")
    if not options["trainpref"] and not options["srcdict"]:
        raise InputError("--trainpref is missing: give PREFIX of texts PREFIX.LANGUAGE")
    languages = [options["source_lang"]] if options["only_source"] else [options["source_lang"], options["target_lang"]]
    languages += [options["align_suffix"]] if options["align_suffix"] else []
    for name in ("trainpref", "validpref", "testpref"):
        for prefix in filter(None, (options[name] or "").split(",")):
            _check_texts(_flag(name), [f"{prefix}.{language}" if language else prefix for language in languages])


def _check_texts(flag: str, paths: list[str]) -> None:
    counts = [_lines(flag, Path(path)) for path in paths]
    if len(set(counts)) > 1:
        raise InputError(
            f"{flag}: {paths[0]} has {counts[0]:,} lines and {paths[1]} has {counts[1]:,}: "
            "give texts that go line by line"
        )


def _lines(flag: str, path: Path) -> int:
    if not path.is_file():
        raise InputError(f"{flag}: {path} does not exist: give PREFIX of texts PREFIX.LANGUAGE")
    try:
        with path.open(encoding="utf-8") as text:
            count = sum(1 for _ in text)
    except UnicodeDecodeError as error:
        raise InputError(f"{flag}: {path} is no UTF-8 ({error.reason} at byte {error.start}): convert it") from None
    if not count:
        raise InputError(f"{flag}: {path} is empty: give a text")
    return count
