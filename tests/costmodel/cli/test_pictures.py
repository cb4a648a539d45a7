"""A picture is a whole file, and its key names what it shows."""

import itertools
import re
import shutil
import subprocess

import pytest

pytest.importorskip("matplotlib")

from dsq import costmodel
from dsq.costmodel.cli.main import main
from dsq.costmodel.cli.pictures.plan import front
from dsq.costmodel.cli.pictures.roofline import MARKERS, roofs
from dsq.costmodel.hardware.hardware import load_hardware
from dsq.costmodel.model.operations import CLASSES


def test_the_key_of_a_plan_names_every_method(tmp_path):
    path = tmp_path / "plan.svg"
    assert main(["plan", "gpt2", "--sequences", "4", "--picture", str(path)]) == 0
    drawn = path.read_text()
    assert all(f"<!-- {row.method.name} -->" in drawn for row in costmodel.plan("gpt2", sequences=4).rows)


def test_the_key_of_a_roofline_names_every_class_of_every_setup(tmp_path):
    path = tmp_path / "roofline.svg"
    assert main(["roofline", "[16,4,4,16]", "[2,2,2,16]", "--picture", str(path)]) == 0
    drawn = path.read_text()
    for setup in ("[16,4,4,16]", "[2,2,2,16]"):
        assert all(
            re.search(rf"<!-- .*{re.escape(setup)}, {name}: \d+% of .*, \d+% of time -->", drawn) for name in CLASSES
        )


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


@pytest.mark.parametrize("question", [("plan", "gpt2", "[8,4,8,8] all"), ("roofline", "[16,4,4,16]", "[2,2,2,16]")])
def test_a_picture_is_a_whole_file_beside_the_answer(capsys, tmp_path, question):
    path = tmp_path / "picture.png"
    assert main([*question, "--picture", str(path)]) == 0
    assert capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_plans_page_opens_by_itself_in_a_browser(capsys, tmp_path):
    """Its scripts run without a network: both pictures are drawn, and the menu names the methods."""
    pytest.importorskip("plotly")
    path = tmp_path / "plan.html"
    assert main(["plan", "gpt2", "--html", str(path)]) == 0
    assert 'src="http' not in path.read_text()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
    home = f"--user-data-dir={tmp_path / 'profile'}"
    said = subprocess.run([browser, *options, home, path.as_uri()], capture_output=True, text=True, timeout=120)
    drawn = said.stdout[said.stdout.rindex("<svg") - 10**6 :]
    assert "cartesianlayer" in drawn
    assert "gpt2: better down and left" in drawn
    assert "bf16, selective recompute" in said.stdout
