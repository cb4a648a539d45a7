"""fairseq 0.12.2 as the shims leave it."""

import io
import pickle
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import fairseq
import numpy as np
import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.file_io import PathManager
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax

from fairseq_plugin import bleu_counts, shims, startup
from fairseq_plugin.flags import InputError
from tests.fairseq_plugin.harness import LEVELS, MODEL, ROOT, run, weights


def built(data: Path, *arguments: str) -> torch.nn.Module:
    """The model that fairseq-train would build."""
    args = options.parse_args_and_arch(options.get_training_parser(), [str(data), *arguments])
    cfg = convert_namespace_to_omegaconf(args)
    return tasks.setup_task(cfg.task).build_model(cfg.model)


@pytest.mark.parametrize("levels", [[], ["--dsq-levels", LEVELS]])
def test_no_dead_parameters(data: Path, levels: list[str]) -> None:
    words, d, f = 24, 512, 1024
    attention, feed_forward, norm = 4 * (d * d + d), d * f + f + f * d + d, 2 * d
    encoder = 6 * (attention + feed_forward + 2 * norm)
    decoder = 6 * (2 * attention + feed_forward + 3 * norm)
    model = built(data, *("--arch", "transformer_iwslt_de_en", "--max-tokens", "64", "--optimizer", "adam"), *levels)
    assert sum(p.numel() for p in model.parameters()) == encoder + decoder + 3 * words * d  # two embeddings, one output


def test_noise_that_stays_in_the_weights_is_refused(data: Path) -> None:
    noise = ["--quant-noise-pq", "0.1", "--quant-noise-pq-block-size", "8"]
    built(data, *MODEL, *noise)
    with pytest.raises(InputError, match="--quant-noise-pq does not go with --dsq-levels"):
        built(data, *MODEL, *noise, "--dsq-levels", LEVELS)


def test_a_checkpoint_with_the_dead_parameters_loads(data: Path) -> None:
    model = built(data, *MODEL)
    old = model.state_dict()
    for layer in ("encoder.layers.0.", "encoder.layers.1."):
        old.update({layer + name: torch.zeros(1) for name in shims.FUSED_PARAMETERS})
    model.load_state_dict(old, strict=True)


def test_adaptive_layers_have_no_uninitialized_memory() -> None:
    inputs = AdaptiveInput(24, 1, 8, 4.0, 8, [10, 24])
    AdaptiveSoftmax(24, 8, [10], dropout=0.0)
    tied = AdaptiveSoftmax(24, 8, [10], dropout=0.0, adaptive_inputs=inputs)
    assert not inputs._float_tensor
    assert not tied.head._float_tensor


def test_padding_changes_nothing_after_loading(data: Path) -> None:
    # the fused path, which a loaded encoder took in evaluation, crashed here
    model = built(data, *MODEL)
    model.load_state_dict(model.state_dict())
    model.eval()
    long, short = torch.tensor([[7, 8, 9, 10, 2]]), torch.tensor([[11, 12, 2]])
    padded = torch.cat([long, torch.nn.functional.pad(short, (2, 0), value=model.encoder.padding_idx)])
    together = model.encoder(padded, torch.tensor([5, 3]))["encoder_out"][0]
    unpadded = model.encoder(short, torch.tensor([3]))["encoder_out"][0]
    torch.testing.assert_close(together[2:, 1], unpadded[:, 0])


def test_no_module_of_fairseq_has_pythons_eval() -> None:
    package = Path(fairseq.__file__).parent
    calling = [path for path in package.rglob("*.py") if re.search(r"(?<![.\w])eval\(", path.read_text())]
    calling = [path for path in calling if "examples" not in path.parts]  # programs of their own
    assert len(calling) > 10
    for path in calling:
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        assert vars(sys.modules[name])["eval"] is shims.evaluate, name


@pytest.mark.parametrize(
    ("text", "value"),
    [("(0.9, 0.98)", (0.9, 0.98)), ("[(512, 3)] * 2 + [(9, -1)]", [(512, 3)] * 2 + [(9, -1)]), (" True", True)],
)
def test_values_of_options(text: str, value: object) -> None:
    assert shims.evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("print()", "x", "[].append", "[i for i in [1]]", "9 ** 9", "1 +", "(1)(2)", "[] - 1", ""),
        *(f"{'-' * 5000}1", f"[0] * {2**60}", f"[0] * {2**80}", "\udcff"),  # too deep, too large, no text
    ],
)
def test_code_is_no_value_of_an_option(text: str) -> None:
    with pytest.raises(ValueError, match="must be made of numbers and lists"):
        shims.evaluate(text)


@pytest.mark.parametrize("text", ["'a' * 3000000000", "[0] * 99999 * 99999", "[[0] * 9999] * 9999", "0, " * 9999])
def test_a_long_value_takes_no_memory(text: str) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"and be short, got .{,110}$"):
        shims.evaluate(text)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


COUNTS = {"scalars": [np.float64(1.5), np.int64(-3)], "arrays": [np.array([1.5, 2.0]), np.arange(6).reshape(2, 3).T]}


def saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_counts_of_a_checkpoint_are_numpys_again_once_saved() -> None:
    loaded = bleu_counts.reading_counts(torch.load)(saved(COUNTS), weights_only=True)
    assert [type(x) for x in loaded["scalars"]] == [np.float64, np.int64]
    reloaded = torch.load(saved(loaded), weights_only=False)
    assert [type(x) for x in reloaded["arrays"]] == [np.ndarray, np.ndarray]
    for states in (loaded, reloaded):
        for name, values in COUNTS.items():
            for value, expected in zip(states[name], values, strict=True):
                np.testing.assert_array_equal(value, expected, strict=name == "scalars")
                assert value.dtype == expected.dtype


class Call:
    """Pickled as a call of ``function``, whose result then takes ``state``."""

    def __init__(self, function: object, *arguments: object, state: object = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> object:
        return self.reduced


EMPTY = np.empty(0).__reduce__()[:2]
FLOAT64 = np.dtype("f8")
SIXTEEN = b"A" * 16


@pytest.mark.parametrize(
    "array",
    [
        Call(np.ndarray, (8,), FLOAT64, bytearray(64), -64),  # out of its buffer
        Call(np.ndarray, (8,), FLOAT64, bytearray(64), -(1 << 44)),
        Call(np.ndarray, (1 << 40,)),
        Call(EMPTY[0], np.ndarray, (1 << 40,), b"b"),
        Call(np.dtype, "O"),
        np.array([None]),
        np.array([1 + 2j]),
        np.array([1.0]).astype(">f8"),
        Call(FLOAT64.__reduce__()[0], "f8", state=(3, "|", None, None, None, 8, 8, 63)),
        *(
            Call(EMPTY[0], *EMPTY[1], state=state)
            for state in (
                (1, (3,), FLOAT64, False, SIXTEEN),
                (1, (-1, -2), FLOAT64, False, SIXTEEN),
                (1, (1 << 63, 2, 0), FLOAT64, False, b""),
                (1, (2,), FLOAT64, False, [1, 2]),
                (1, (2,), "f8", False, SIXTEEN),
                (2,),
            )
        ),
        Call(np.float64(0).__reduce__()[0], FLOAT64, SIXTEEN),
    ],
)
def test_no_other_array_of_a_checkpoint_is_built(array: object) -> None:
    with pytest.raises(pickle.UnpicklingError):
        bleu_counts.reading_counts(torch.load)(saved(array), weights_only=True)


def test_an_array_is_filled_once() -> None:
    """torch.from_numpy, which a checkpoint may call, shares its memory."""
    array = bleu_counts.reading_counts(torch.load)(saved(np.ones(2)), weights_only=True)
    dtype = bleu_counts.CountDtype("f8")
    for filled in (array, array[:0]):
        with pytest.raises(pickle.UnpicklingError):
            filled.__setstate__((1, (2,), dtype, False, SIXTEEN))


def test_copying_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, last = tmp_path / "new.pt", tmp_path / "last.pt"
    new.write_text("new checkpoint")
    last.write_text("old checkpoint")

    def half(source: str, target: str) -> None:
        Path(target).write_text("new che")
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfile", half)
    with pytest.raises(KeyboardInterrupt):
        PathManager.copy(str(new), str(last), overwrite=True)
    assert last.read_text() == "old checkpoint"
    monkeypatch.undo()
    PathManager.copy(str(new), str(last), overwrite=True)
    assert last.read_text() == "new checkpoint"


def test_bleu_in_validation_survives_a_resume(data: Path, tmp_path: Path) -> None:
    bleu = ["--eval-bleu", "--eval-bleu-args", '{"beam": 1, "max_len_b": 5}', "--best-checkpoint-metric", "bleu"]
    for update in (1, 2):
        run("train", data, *MODEL, *bleu, "--save-interval-updates", 1, "--max-update", update, "--save-dir", tmp_path)
    saved = bleu_counts.reading_counts(torch.load)(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert saved["optimizer_history"][-1]["num_updates"] == 2


@pytest.mark.parametrize(
    ("dtype", "flags"),
    [
        (torch.bfloat16, ["--bf16"]),
        (torch.float16, ["--memory-efficient-fp16"]),
        (torch.float16, ["--fp16", "--fp16-no-flatten-grads"]),  # plain --fp16 needs a GPU
    ],
)
def test_half_precision_trains_on_a_cpu(data: Path, tmp_path: Path, dtype, flags, calls) -> None:
    run("train", data, *MODEL, *flags, "--max-update", 3, "--save-dir", tmp_path, "--dsq-levels", LEVELS)
    assert {(call.dtype, call.weight.dtype) for call in calls} == {(dtype, dtype)}
    assert weights(tmp_path)["dsq._extra_state"]["validations"][0]["loss"] < 5.3  # of an untrained model: 5.7


def test_the_unmodified_fairseq_train(data: Path, tmp_path: Path) -> None:
    startup.install(tmp_path)
    command = f"import site; site.addsitedir({str(tmp_path)!r}); from fairseq_cli.train import cli_main; cli_main()"
    flags = [data, *MODEL, "--user-dir", ROOT / "fairseq_plugin", "--dsq-levels", LEVELS, "--max-update", 1]
    words = [sys.executable, "-c", command, *map(str, flags), "--save-dir", str(tmp_path / "run")]
    subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "run" / "dsq_history.json").exists()
    startup.uninstall(tmp_path)
    assert not list(tmp_path.glob("*.pth"))


def test_other_programs_numpy_arrays_load_beside_the_plugin() -> None:
    """Hugging Face's Trainer trusts NumPy's own names in the files of its random states."""
    state = {"numpy": np.arange(4, dtype=np.uint32)}
    names = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.zeros(1).__reduce__()[0]]
    with torch.serialization.safe_globals(names):
        assert torch.equal(
            torch.from_numpy(torch.load(saved(state), weights_only=True)["numpy"].astype(int)), torch.arange(4)
        )
