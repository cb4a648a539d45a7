"""A picture is a whole file, and its key names what it shows."""

import itertools
import re

import pytest

pytest.importorskip("matplotlib")

from dsq import costmodel
from dsq.costmodel.cli.main import main
from dsq.costmodel.cli.pictures.plan import front
from dsq.costmodel.cli.pictures.roofline import MARKERS, roofs
from dsq.costmodel.hardware.hardware import load_hardware
from dsq.costmodel.model.methods import USUAL
from dsq.costmodel.model.operations import CLASSES

PLANNED = [re.escape(f"<!-- {method.name} -->") for method in USUAL]
SETUPS = "[16,4,4,16]", "[2,2,2,16]"
OF_ROOFS = [rf"<!-- .*{re.escape(it)}, {name}: \d+% of .*, \d+% of time -->" for it in SETUPS for name in CLASSES]


@pytest.mark.parametrize(
    ("question", "key"), [(("plan", "gpt2", "--sequences", "4"), PLANNED), (("roofline", *SETUPS), OF_ROOFS)]
)
def test_a_picture_beside_the_answer_names_every_method_or_every_class_of_every_setup(capsys, tmp_path, question, key):
    path = tmp_path / "picture.svg"
    assert main([*question, "--picture", str(path)]) == 0
    assert capsys.readouterr().out
    drawn = path.read_text()
    assert all(re.search(each, drawn) for each in key)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_each_class_of_operations_has_a_mark_of_its_own():
    assert list(MARKERS) == list(CLASSES)
    assert len(set(MARKERS.values())) == len(CLASSES)


def test_roofs_of_about_one_rate_share_a_label():
    found = roofs(load_hardware("h100"))
    assert ["fp8", "int8"] in [names for _, names in found]
    assert ["fp32", "vector"] in [sorted(names) for _, names in found]
    assert all(high[0] > 1.3 * low[0] for high, low in itertools.pairwise(found))


def test_nothing_beats_a_method_of_the_front_in_both_time_and_memory():
    plan = costmodel.plan("gpt2", "rtx-3090", sequences=4)
    kept = front(plan.rows)
    assert 1 < len(kept) < len(plan.rows)
    for row in plan.rows:
        ahead = [one for one in kept if one.step.seconds <= row.step.seconds and one.memory.peak <= row.memory.peak]
        assert ahead if row not in kept else ahead == [row]


def test_a_plans_page_loads_nothing_and_names_every_method(tmp_path):
    pytest.importorskip("plotly")
    path = tmp_path / "plan.html"
    assert main(["plan", "gpt2", "--html", str(path)]) == 0
    page = path.read_text()
    assert 'src="http' not in page
    assert "gpt2: better down and left" in page
    assert all(method.name in page for method in USUAL)
