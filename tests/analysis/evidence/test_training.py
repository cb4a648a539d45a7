"""A training of each kind, of a few updates on made-up data."""

import dataclasses
import gzip
import lzma
import math
import pickle
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analysis.evidence import graphs, loop, problems, translations
from analysis.evidence.suite import SUITE as SUITE_FILE
from analysis.evidence.suite import Setting, Task, load_suite
from analysis.translation import demo
from analysis.translation.training import Text, Trained

SUITE, PAPER = load_suite(), load_suite(SUITE_FILE.with_name("paper.toml"))
SETTINGS = ("fp32", "[8,4,4,8]")
UPDATES = 20


def small(name: str, updates: int = UPDATES, **sizes: int) -> Task:
    task = SUITE.tasks[name]
    return dataclasses.replace(task, updates=updates, batch=task.batch and 4, sizes={**task.sizes, **sizes})


def check(task: Task, files: list[Path], work: Path, names: tuple[str, ...] = SETTINGS) -> dict[str, loop.Result]:
    """The settings end near fp32, not on it; a second run gives the same; the packed stash is smaller."""
    results = {name: problems.run_once(task, SUITE.settings[name], 1, files, work) for name in names}
    fp32 = results["fp32"]
    assert problems.run_once(task, SUITE.settings["fp32"], 1, files, work) == fp32
    assert all(math.isclose(one.loss, fp32.loss, rel_tol=0.1) for one in results.values())
    assert len({one.loss for one in results.values()}) == len(results)
    assert all(0 <= one.score <= 100 for one in results.values())
    return results


def labeled(folder: Path, *lines: str) -> list[Path]:
    """Files of these lines to train on and to judge by."""
    files = [folder / f"tiny.{split}.tsv" for split in ("train", "dev")]
    for file in files:
        file.write_text("\n".join(lines) + "\n")
    return files


def test_language(tmp_path: Path) -> None:
    file = tmp_path / "tiny.txt.xz"
    file.write_bytes(lzma.compress(b"to be or not to be, that is the question.\n" * 60))
    task = small("shakespeare", context=16, width=16, blocks=2, heads=2)
    results = check(task, [file], tmp_path, (*SETTINGS, "bf16 autocast", "[8,4,4,8] all", "schedule", "checkpoint"))
    held = {name: one.saved_mib for name, one in results.items()}
    assert held["checkpoint"] < held["[8,4,4,8] all"] < held["[8,4,4,8]"] < held["fp32"]


def test_language_on_subwords(tmp_path: Path) -> None:
    files = [tmp_path / "train.xz", tmp_path / "valid.xz"]
    for file in files:
        file.write_bytes(lzma.compress(b"to be or not to be, that is the question.\n" * 30))
    task = small("wikitext2-1024", context=16, width=16, blocks=1, heads=2, vocab=30)
    assert problems.run_once(task, SUITE.settings["fp32"], 1, files, tmp_path).loss < math.log(30)


def test_sentences(tmp_path: Path) -> None:
    files = labeled(tmp_path, "label\tsentence", *("1\ta good film", "0\ta bad film") * 20)
    check(small("sst2", width=16, blocks=1), files, tmp_path)
    pytest.importorskip("transformers")
    config = SUITE.tasks["sst2-t5"].config | {"d_model": 16, "num_layers": 1}
    task = dataclasses.replace(small("sst2-t5"), config=config)
    assert math.isfinite(problems.run_once(task, SUITE.settings["fp32"], 1, files, tmp_path).loss)


def test_finetuning(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    files = labeled(tmp_path, "label\tsentence1\tsentence2", *("1\ta b\ta b", "0\ta b\tc d e") * 8)
    model = tmp_path / "model"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=10, **sizes)
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(model)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcde"]
    (model / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)
    files.append(model / "config.json")
    check(dataclasses.replace(small("mrpc"), rate=1e-2), files, tmp_path)
    pytest.importorskip("peft")
    adapted = problems.make(small("mrpc-lora"), 1, files).model
    trained = [name for name, one in adapted.named_parameters() if one.requires_grad]
    assert len(trained) == 2 * 7 + 2  # two matrices of each linear layer of the encoder; the head
    assert all("lora_" in name or "classifier" in name for name in trained)


@pytest.mark.parametrize("name", ["vit", "resnet", "swin", "pvt"])
def test_images(tmp_path: Path, name: str) -> None:
    files = []
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        labels = generator.integers(0, 10, 16).astype(np.uint8)
        pictures = (generator.integers(0, 30, (16, 28, 28)) + 20 * labels[:, None, None]).astype(np.uint8)
        for part in (pictures, labels):
            files.append(tmp_path / f"{split}{part.ndim}.gz")
            files[-1].write_bytes(
                gzip.compress(struct.pack(f">BBBB{part.ndim}i", 0, 0, 8, part.ndim, *part.shape) + part.tobytes())
            )
    if SUITE.tasks[name].config:
        pytest.importorskip("transformers")
    if name == "vit":
        check(small(name, width=16, heads=2, blocks=1), files, tmp_path)
    else:  # after so few updates the running means of batch norm say little
        results = [
            problems.run_once(small(name, width=8), SUITE.settings["fp32"], 1, files, tmp_path) for _ in range(2)
        ]
        assert results[0] == results[1]
        assert math.isfinite(results[0].loss)


class csr_matrix:
    """Pickles as scipy's does."""

    def __init__(self, dense: np.ndarray) -> None:
        rows, columns = np.nonzero(dense)
        self.indices, self.data, self._shape = columns, dense[rows, columns], dense.shape
        self.indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])


@pytest.fixture
def planetoid(tmp_path: Path) -> Path:
    """Ten nodes of two classes: 4 labeled, 6 known, the test nodes 9 and 6; 7 and 8 are in no file."""
    y = np.eye(2)[[0, 1, 0, 1, 0, 1, 0, 1]]
    x = np.concatenate([y, y], 1)
    graph = {node: [(node + 2) % 10] for node in range(10)}
    parts = {"x": csr_matrix(x[:4]), "allx": csr_matrix(x[:6]), "tx": csr_matrix(x[6:])}
    parts |= {"y": y[:4], "ally": y[:6], "ty": y[6:]}
    for name, part in {**parts, "graph": graph}.items():
        (tmp_path / f"ind.tiny.{name}").write_bytes(pickle.dumps(part, protocol=4))
    (tmp_path / "ind.tiny.test.index").write_text("9\n6\n")
    return tmp_path / "ind.tiny.graph"


def test_planetoid_puts_test_nodes_where_their_index_says(planetoid: Path) -> None:
    graph = graphs.read_planetoid(planetoid)
    assert graph.x.shape == (10, 4)
    assert graph.x[9].tolist() == [0.5, 0, 0.5, 0]
    assert graph.x[6].tolist() == [0, 0.5, 0, 0.5]
    assert not graph.x[7:9].any()
    assert graph.train.tolist() == [0, 1, 2, 3]
    assert graph.held_out[-2:].tolist() == [6, 9]
    edges = set(zip(graph.source.tolist(), graph.target.tolist(), strict=True))
    assert edges == {(a, b) for a in range(10) for b in (a, (a + 2) % 10, (a - 2) % 10)}


@pytest.mark.parametrize(
    ("name", "sizes"), [("gcn-cora", {}), ("gat-cora", {"heads": 2}), ("gcnii-cora", {"layers": 2})]
)
def test_graph(tmp_path: Path, planetoid: Path, monkeypatch: pytest.MonkeyPatch, name: str, sizes: dict) -> None:
    monkeypatch.setattr(graphs, "VALIDATION", 2)
    check(small(name, width=16, repeats=2, **sizes), [planetoid], tmp_path)


def test_a_gcnii_layer_mixes_its_input_with_the_first_one(planetoid: Path) -> None:
    graph = graphs.read_planetoid(planetoid)
    layer = graphs.GCNIILayer(4, 2, graph)
    torch.nn.init.eye_(layer.linear.weight)
    x, first = torch.rand(10, 4), torch.rand(10, 4)
    torch.testing.assert_close(layer(x, first), 0.9 * layer.propagate(x) + 0.1 * first)
    torch.nn.init.zeros_(layer.linear.weight)
    expected = (1 - math.log(1.25)) * (0.9 * layer.propagate(x) + 0.1 * first)
    torch.testing.assert_close(layer(x, first), expected)


def test_a_gcn_layer_is_the_normalized_adjacency_times_the_linear_layer(planetoid: Path) -> None:
    graph = graphs.read_planetoid(planetoid)
    linear, propagate = graphs.GraphModel(graph, 8, 3, 0, 0.0).layers[1]
    adjacency = torch.zeros(10, 10)
    adjacency[graph.target, graph.source] = 1
    scale = adjacency.sum(1).rsqrt()
    hidden = linear(torch.randn(10, 8))
    torch.testing.assert_close(propagate(hidden), (scale[:, None] * adjacency * scale) @ hidden)


def test_the_attention_of_gat_sums_to_one(planetoid: Path) -> None:
    graph = graphs.read_planetoid(planetoid)
    layer = graphs.GATLayer(4, 3, 2, 0.0, graph)
    with torch.no_grad():
        layer.linear.weight.zero_()
        layer.linear.bias.fill_(1)
    torch.testing.assert_close(layer(graph.x), torch.ones(10, 6))


def test_translation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From pairs of sentences to BLEU, by fairseq's commands; and step by step, by its trainer."""
    if find_spec("fairseq") is None:  # fairseq_plugin is for the code to import, before fairseq
        pytest.skip("fairseq is not installed")
    train, seen, files = translations.training.train, [], []

    def seen_through(text: Text, binary: Path, out: Path, *rest: Any) -> Trained:
        one = train(text, binary, out, *rest)
        seen.append((one, (out / "train.log").read_text(), demo.kept(one.checkpoint)))
        return one

    monkeypatch.setattr(translations.training, "train", seen_through)
    for split, pairs in (("train", 60), ("dev", 6), ("test", 6)):
        files.append(tmp_path / f"tiny.{split}.tsv")
        words = [["ein", "zwei", "drei", "vier"][i % 4 :][: 1 + i % 3] for i in range(pairs)]
        lines = [f"{' '.join(some)}\t{' '.join(some)[::-1]}" for some in words]
        files[-1].write_text("\n".join(lines) + "\n")
    model = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    model |= dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim", "encoder_ffn_embed_dim"), 16)
    task = dataclasses.replace(small("multi30k-900", updates=6), sizes={"pairs": 30, "vocab": 30, **model}, batch=60)
    setting = Setting("two levels", "[2,2,2,16] [16,4,4,16]", rise_at=0.5, autocast=True)
    results = problems.run_once(task, setting, 1, files, tmp_path)
    ((trained, log, saved),) = seen
    assert results.loss < math.log(100)
    assert (results.score, len(trained.translations), trained.valid_losses[-1][0]) == (trained.bleu, 6, 6)
    assert 0 <= results.score <= 100
    assert "DSQ level 0 [2,2,2,16] -> 1 [16,4,4,16]" in log
    assert 10_000 < saved < 1_000_000  # of a model with the linears' stash packed
    (pieces,) = tmp_path.glob("*/pieces/train.de")
    assert len(pieces.read_text().splitlines()) == 30
    step = translations.steps(task, SUITE.settings["[8,4,8,8] all"], 1, files, tmp_path)
    assert all(math.isfinite(step()["loss"]) for _ in range(3))


def test_flags_of_a_translation() -> None:
    def given(setting: str) -> dict[str, str]:
        words = translations.flags(small("enja", updates=900), SUITE.settings[setting], 3)
        return {name: words[words.index(name) + 1] for name in words if name.startswith("--") and name != "--cpu"}

    fp32 = given("fp32")
    assert fp32["--max-update"] == fp32["--total-num-update"] == "900"
    assert fp32["--seed"] == "3"
    usual = {"--dsq-stash": "all", "--dsq-format": "snvint", "--dsq-rounding": "nearest"}
    assert given("schedule all") == fp32 | usual | {"--dsq-rise-at": "0.8"}
    assert given("bf16 autocast") == given("gact") == fp32


@pytest.mark.parametrize("task", PAPER.tasks.values(), ids=lambda task: task.name)
def test_dsq_train_takes_the_flags_of_the_papers_sizes(task: Task) -> None:
    pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")
    from fairseq import options

    from fairseq_plugin.flags import config_of

    setting = PAPER.settings["bfp [2,2,2,16] [16,4,4,16]"]
    words = ["data", "--task", "translation", "--arch", "transformer", "--optimizer", "adam"]
    words += ["--criterion", "label_smoothed_cross_entropy", "--dsq-levels", setting.levels]
    words += translations.flags(task, setting, 1)
    arguments = options.parse_args_and_arch(options.get_training_parser(), words)
    config = config_of(arguments)
    assert (config.tied, config.patience, config.format) == (True, 5, "bfp")
    assert (arguments.max_update, arguments.max_epoch, arguments.max_tokens) == (0, task.flags["max-epoch"], 4096)
    assert arguments.decoder_ffn_embed_dim == task.flags["decoder-ffn-embed-dim"]
    assert not arguments.cpu


def test_a_model_without_blocks_cannot_be_checkpointed() -> None:
    with pytest.raises(ValueError, match="no list of blocks"):
        loop.apply_policies(torch.nn.Linear(2, 2), SUITE.settings["checkpoint"])


def test_a_problem_goes_to_another_device_with_its_batches() -> None:
    linear = torch.nn.Linear(3, 2)
    problem = loop.Problem(linear, lambda batch: (linear(batch[0]), batch[1]), iter(()), ())
    logits, labels = loop.on(problem, torch.device("meta")).predict((torch.ones(4, 3), torch.zeros(4)))
    assert linear.weight.is_meta
    assert logits.is_meta
    assert labels.is_meta


def test_translations_and_graphs_run_on_the_cpu_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--device cuda: multi30k-900, of the kind translation"):
        problems.run_once(SUITE.tasks["multi30k-900"], SUITE.settings["fp32"], 1, [], tmp_path, "cuda")
