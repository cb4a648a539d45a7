"""Promises of an installed package: its version, its types in the README's own words, its needs."""

import doctest
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dsq

ROOT = Path(__file__).parents[1]
#: uses of the API whose types are held
TYPES = """
same: nn.Sequential = dsq.convert(nn.Sequential(nn.Linear(4, 4)))
packed: dsq.Packed = dsq.pack(x, dsq.BFP(4))
dsq.set_level(model, dynamic.config, 1)
rose: bool = dynamic.step(1.0)
advised: dsq.DSQConfig = dsq.DSQConfig.of("[8,4,8,8]", stash="all")
z: torch.Tensor = dsq.quantize(x, dsq.BFP(4))
version: str = dsq.__version__
"""


def blocks(page):
    """The Python of a page, block after block."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


def examples():
    """The statements and expressions of the page of public names."""
    return doctest.DocTestParser().get_examples((ROOT / "docs" / "reference.md").read_text())


@pytest.fixture
def snippets(tmp_path):
    """The README's code and that of the page of public names, as files."""
    (tmp_path / "readme.py").write_text("\n".join([*blocks("README.md"), TYPES]))
    (tmp_path / "reference.py").write_text("".join(example.source for example in examples()))
    return tmp_path


def test_the_snippets_pass_mypy(snippets):
    pytest.importorskip("mypy")
    options = ["--strict", "--config-file=", "--follow-imports=silent"]
    options += ["--allow-untyped-calls"]  # PyTorch's backward has no types
    options += ["--cache-dir", ".mypy_cache/snippets"]  # other options than make lint's would spoil its cache
    done = run("-m", "mypy", *options, *map(str, snippets.glob("*.py")))
    assert done.returncode == 0, done.stdout


def test_the_snippets_pass_pyright(snippets):
    pytest.importorskip("pyright")
    options = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "reportUnusedExpression": False}
    options |= {"reportUnknownMemberType": False}  # PyTorch's backward and step have no types
    (snippets / "pyrightconfig.json").write_text(json.dumps(options))
    done = run("-m", "pyright", "--pythonpath", sys.executable, "-p", str(snippets))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/trainers.md", "docs/config.md"])
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    assert blocks(page)
    for block in blocks(page):
        exec(compile(block, page, "exec"), names)
    if page == "README.md":
        (bytes_line,) = re.findall(r"    (saved for the backward: .* now \(\d+%\))", (ROOT / page).read_text())
        assert bytes_line in capsys.readouterr().out


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_every_public_name_has_an_example_that_runs():
    page = ROOT / "docs" / "reference.md"
    assert doctest.testfile(str(page), module_relative=False).failed == 0
    sources = "".join(example.source for example in examples())
    missing = [name for name in dsq.__all__ if not re.search(rf"\bdsq\.{name}\b", sources)]
    assert missing == []


def test_plots_are_an_extra_and_a_gpu_alone_needs_triton():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert not {"pandas", "matplotlib"} & set(needed)
    block = "import sys; sys.modules.update(dict.fromkeys(('pandas', 'matplotlib', 'transformers', 'fairseq')));"
    use = "import torch, dsq; assert 'triton' not in sys.modules;"
    use += "dsq.convert(torch.nn.Sequential(torch.nn.Linear(4, 4))); print(dsq.__version__)"
    done = run("-c", f"{block} {use}")
    assert done.stdout.strip() == dsq.__version__, done.stderr
    command = "from dsq.costmodel.cli.main import main; sys.exit(main(sys.argv[1:]))"
    question = ("[16,4,4,16]", "--workload", "roberta_base_mnli", "--hardware", "h100")
    done = run("-c", f"{block} {command}", "roofline", *question, "--picture", "none.png")
    assert done.returncode == 2
    assert done.stderr == "dsq-cost roofline: error: matplotlib is not installed: pip install 'dsq-torch[plots]'\n"
