"""A picture is a whole file, and its key names what it shows."""

import itertools
import re

import pytest

pytest.importorskip("matplotlib")

from dsq import costmodel
from dsq.costmodel.cli.main import main
from dsq.costmodel.cli.pictures.plan import front
from dsq.costmodel.cli.pictures.roofline import MARKERS, roofs, spread
from dsq.costmodel.hardware.hardware import load_hardware
from dsq.costmodel.model.methods import USUAL
from dsq.costmodel.model.roofline import STEP_CLASSES

PLANNED = [re.escape(f"<!-- {method.name} -->") for method in USUAL if method.trusted]
SETUPS = "[16,4,4,16]", "[2,2,2,16]", "fixed:[16,16,16,16]", "float:[16,16,16,16]"
OF_ROOFS = [rf"<!-- .*{re.escape(setup.rpartition(':')[2])}: [\d,.]+ ms -->" for setup in SETUPS]


@pytest.mark.parametrize(
    ("question", "key"), [(("plan", "gpt2", "--sequences", "4"), PLANNED), (("roofline", *SETUPS), OF_ROOFS)]
)
def test_a_picture_beside_the_answer_names_every_method_or_setup(capsys, tmp_path, question, key):
    path = tmp_path / "picture.svg"
    assert main([*question, "--picture", str(path)]) == 0
    assert capsys.readouterr().out
    drawn = path.read_text()
    assert all(re.search(each, drawn) for each in key)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_each_class_of_operations_has_a_mark_of_its_own():
    assert list(MARKERS) == [*STEP_CLASSES, "total"]
    assert len(set(MARKERS.values())) == len(MARKERS)


def test_roofs_of_about_one_rate_share_a_label():
    labels = roofs(load_hardware("h100"))
    assert "vector 66.9, fp32 52.18" in [label for _, label in labels]
    assert all(high[0] > 1.4 * low[0] for high, low in itertools.pairwise(labels))


def test_labels_of_setups_cover_neither_one_another_nor_a_roof():
    heights = spread([100, 99, 30], [95, 20])
    assert all(high >= 1.49 * low for high, low in itertools.pairwise(heights))
    assert not any(roof / 1.25 < height < roof * 1.75 for height in heights for roof in (95, 20))
    assert all(height <= rate for height, rate in zip(heights, [100, 99, 30], strict=True))


def test_nothing_beats_a_method_of_the_front_in_both_time_and_memory():
    plan = costmodel.plan("gpt2", "rtx-3090", sequences=4)
    kept = front(plan.rows)
    assert 1 < len(kept) < len(plan.rows)
    for row in plan.rows:
        ahead = [one for one in kept if one.step.launched <= row.step.launched and one.memory.peak <= row.memory.peak]
        assert ahead if row not in kept else ahead == [row]


def test_a_plans_page_loads_nothing_and_names_every_method(tmp_path):
    pytest.importorskip("plotly")
    path = tmp_path / "plan.html"
    assert main(["plan", "gpt2", "--html", str(path)]) == 0
    page = path.read_text()
    assert 'src="http' not in page
    assert "gpt2: better down and left" in page
    assert all(method.name in page for method in USUAL)
