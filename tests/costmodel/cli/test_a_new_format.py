"""A format that enters the registry is costed with no line of its own in the cost model."""

import csv
import io
import json
from dataclasses import dataclass
from typing import ClassVar

import pytest

from dsq.costmodel.cli.main import main
from dsq.formats import FORMATS, Format, Law, register


@pytest.fixture(autouse=True)
def boxed():
    """Boxes of 32, four bytes a tensor, a law of its own, a magnitude one bit under BFP's."""

    @register
    @dataclass(frozen=True, slots=True)
    class Boxed(Format):
        name: ClassVar[str] = "boxed4"
        law: ClassVar[Law] = Law(1 / 2048, 1.0, "half of fixed point's")
        tensor_bytes: ClassVar[int] = 4

        box: int = 32

        @property
        def significand_bits(self) -> int:
            return self.bits - 2

    yield Boxed
    del FORMATS["boxed4"]


@pytest.fixture
def ask(capsys, tmp_path):
    """The first record of the answer about one layer of 64 tokens, 64 in, 64 out."""
    path = tmp_path / "layer.json"
    layer = {"op": "gemm", "name": "fc", "M": 64, "K": 64, "N": 64}
    path.write_text(json.dumps({"costmodel": 1, "name": "layer", "tokens": 64, "operations": [layer]}))

    def answer(*arguments):
        assert main([*arguments, "--workload", str(path), "--csv"]) == 0
        return next(csv.DictReader(io.StringIO(capsys.readouterr().out)))

    return answer


def test_by_name_and_by_prefix(ask):
    by_name, by_prefix = ask("estimate", "[8,8,8,16]", "--format", "boxed4"), ask("estimate", "boxed4:[8,8,8,16]")
    assert by_name == by_prefix
    assert by_name["format"] == "boxed4"


def test_its_bytes_and_the_options_of_its_fields(ask):
    def stash(*arguments):
        return float(ask("estimate", *arguments)["linears_stash_MB"]) * 1e6

    assert stash("boxed4:[8,8,8,16]") == pytest.approx(64 * 64 + 64 * 2 + 4)  # two scales a row
    assert stash("boxed4:[8,8,8,16]", "--box", "16") == pytest.approx(64 * 64 + 64 * 4 + 4)
    assert stash("boxed4:[8,32,8,8]") == pytest.approx(64 * 64 * 4)  # values as they are


def test_its_law(ask):
    paper = ask("estimate", "boxed4:[16,16,16,16]", "--profile", "paper")
    assert (float(paper["arithmetic"]), float(paper["dram"])) == (0.125, 0.5625)  # (32 * 16 + 8) bits: 9 words of 64


def test_hardware_multiplies_it_where_it_holds_the_significands_of_boxes(ask):
    runs_in = [ask("roofline", f"boxed4:[{m},{m},{m},{m}]")["runs_in"] for m in (8, 10, 11, 13, 14)]
    assert runs_in == ["bf16", "bf16", "tf32", "tf32", "4 x bf16"]  # a bit more than BFP's 9 and 12
