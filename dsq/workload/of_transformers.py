"""The workload of a model of transformers, from its config.json: it runs once on the meta device, without data."""

from pathlib import Path
from typing import Any

import torch

from dsq.command import read_json
from dsq.workload import trace

#: ends of the names of classes whose loss takes a label for each token
_LABELLED = ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForPreTraining")


def trace_config(path: str, sequences: int, tokens: int) -> dict[str, Any]:
    """Return the workload of a training step of the model that a config.json, or the one in a folder, describes.

    Encoder and decoder see ``sequences`` of ``tokens`` each. Raises ValueError where the config cannot be read, or the
    model does not run on the meta device.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    fields = read_json(file, f"config {file}")
    try:
        # attention is written out, which runs without data; so do experts in one grouped product
        # transformers reads what it wrote: {"__float__": "Infinity"} in Mamba-2's
        config: Any = transformers.AutoConfig.from_pretrained(
            file, trust_remote_code=False, attn_implementation="eager"
        )
        name = (fields.get("architectures") or [None])[0]
        config.use_cache = config.apply_spec_augment = False  # masks of audio are drawn by NumPy
        if hasattr(config, "num_experts_per_tok"):
            config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            model: Any = (getattr(transformers, name)(config) if name else _auto(config).from_config(config)).float()
    except (OSError, ValueError, KeyError, AttributeError, TypeError, AssertionError, StrictDataclassError) as error:
        raise ValueError(f"config {file} is of no model that transformers builds: {error}") from None
    with torch.device("meta"):
        inputs = _inputs(model, config, sequences, tokens)
        mask = torch.zeros(sequences, 1, tokens, tokens)
    masks = {"full_attention": mask, "sliding_attention": mask}
    message = ""
    # made masks look at data; some need several, or one for the decoder (Whisper)
    for masks_argument in ({}, {"attention_mask": mask}, {"attention_mask": masks}, {"decoder_attention_mask": mask}):
        try:
            return trace(model.train(), **inputs, **masks_argument)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, IndexError) as error:
            message = message or str(error)
    raise ValueError(f"config {file}: {type(model).__name__} does not run on the meta device: {message}")


def _auto(config: Any) -> Any:
    """Return the Auto class of what a config without ``architectures`` is trained as, as `dsq-cost plan` takes it: with
    a head where its kind of model has one."""
    import transformers

    heads = "ForSeq2SeqLM", "ForMaskedLM", "ForCausalLM", "ForImageClassification"  # a BERT is in two of them
    classes = (getattr(transformers, f"AutoModel{head}") for head in heads)
    return next((auto for auto in classes if type(config) in auto._model_mapping), transformers.AutoModel)


def _inputs(model: Any, config: Any, sequences: int, tokens: int) -> dict[str, Any]:
    """Return a batch, with labels where the model makes a loss of them."""
    main = model.main_input_name
    if main == "pixel_values":
        size = getattr(config, "image_size", 224)
        batch = {main: torch.zeros(sequences, getattr(config, "num_channels", 3), size, size)}
        return batch | ({"labels": torch.zeros(sequences).long()} if "ForImageClass" in type(model).__name__ else {})
    if main == "input_values":  # audio: samples, or a spectrogram
        frames = (config.max_length, config.num_mel_bins) if hasattr(config, "num_mel_bins") else None
        return {main: torch.zeros(sequences, *(frames or (tokens * getattr(config, "inputs_to_logits_ratio", 1),)))}
    ids = torch.zeros(sequences, tokens, dtype=torch.long)
    if main == "input_features":
        batch = {main: torch.zeros(sequences, config.num_mel_bins, 2 * config.max_source_positions)}
    else:
        batch = {main: ids}
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return batch | {"labels": torch.zeros(sequences).long()}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids
    return batch | ({"labels": ids} if name.endswith(_LABELLED) else {})
