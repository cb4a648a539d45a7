"""Hardware profiles and the roofline over them."""

import re

import numpy as np
import pytest

from costmodel.arithmetic import products
from costmodel.formats import Format, Precision
from costmodel.hardware import load_hardware
from costmodel.operations import Gemm, Pointwise, Workload
from costmodel.roofline import datatypes, floors
from costmodel.shipped import profile_names
from costmodel.traffic import charges

MINE = """
name = "mine"
[bandwidth]
gb_per_s = 100
source = "measured"
[on_chip]
mb = 8
source = "measured"
[vector]
tflops = 0.1
source = "measured"
[[peak]]
datatype = "wide"
tflops = 1
holds = { bfp = 32, fixed = 32, float = 32 }
source = "measured"
[[peak]]
datatype = "narrow"
tflops = 4
holds = { bfp = 8 }
source = "measured"
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return load_hardware(str(path))


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_name_a_source_for_each_figure_and_run_fp32(name):
    hardware = load_hardware(name)
    assert all(hardware.sources.values())
    assert all(peak.source for peak in hardware.peaks)
    assert all(hardware.datatype(kind, 32) for kind in ("bfp", "fixed", "float"))


def test_named_profiles():
    assert {"a100-80gb", "h100", "h200", "laptop-cpu", "msfp-accelerator"} <= set(profile_names())
    assert load_hardware("h200").bandwidth == 4.8e12


def test_fastest_exact_datatype(mine):
    assert [mine.datatype("bfp", m).datatype for m in (2, 8, 9, 32)] == ["narrow", "narrow", "wide", "wide"]
    assert mine.datatype("fixed", 4).datatype == "wide"
    assert mine.matrix_flops("bfp", np.array([4, 16, 8])).tolist() == [4e12, 1e12, 4e12]
    assert mine.matrix_flops("bfp", 4) == 4e12


@pytest.mark.parametrize(
    "line, replacement, message",
    [
        ('name = "mine"', "", "field name is missing"),
        ('name = "mine"', "name = 3", "field name must be text"),
        ("gb_per_s = 100", "", r"field bandwidth\.gb_per_s is missing"),
        ("gb_per_s = 100", 'gb_per_s = "fast"', r"field bandwidth\.gb_per_s must be a positive number, not 'fast'"),
        ("gb_per_s = 100", "gb_per_s = -1", r"field bandwidth\.gb_per_s must be a positive number"),
        ("gb_per_s = 100", "gb_per_s = nan", r"field bandwidth\.gb_per_s must be a positive number"),
        ("mb = 8", "mb = true", r"field on_chip\.mb must be a positive number"),
        ("[vector]\ntflops = 0.1", "[vector]", r"field vector\.tflops is missing"),
        ('datatype = "narrow"', "", r"field peak\[1\]\.datatype is missing"),
        ("holds = { bfp = 8 }", "holds = 8", r"field peak\[1\]\.holds must be a table"),
        ("holds = { bfp = 8 }", "holds = { int = 8 }", r"field peak\[1\]\.holds\.int must be"),
        ("holds = { bfp = 8 }", 'holds = { bfp = "8" }', r"field peak\[1\]\.holds\.bfp must be"),
        ("[bandwidth]", "bandwidth", "is not TOML"),
    ],
)
def test_bad_hardware_file_names_the_field(line, replacement, message, tmp_path):
    assert line in MINE
    path = tmp_path / "bad.toml"
    path.write_text(MINE.replace(line, replacement, 1))
    with pytest.raises(ValueError, match=message) as error:
        load_hardware(str(path))
    assert str(path) in str(error.value)


def test_unknown_hardware_names_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="nearest is 'a100-80gb'"):
        load_hardware("A100")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'none.toml'} cannot be read")):
        load_hardware(str(tmp_path / "none.toml"))


def test_a_format_the_hardware_lacks_is_named(tmp_path):
    path = tmp_path / "narrow.toml"
    path.write_text(MINE.replace("holds = { bfp = 32, fixed = 32, float = 32 }", "holds = { bfp = 16 }"))
    with pytest.raises(ValueError, match="no peak that holds bfp operands of 32 bits"):
        load_hardware(str(path)).datatype("bfp", 32)


def roofs(workload, precision, mine):
    fmt = Format("bfp")
    multiplied = products(workload, precision, fmt.kind)
    return floors(charges(workload, precision, fmt, mine.on_chip_bytes), multiplied, mine)


def test_floor_by_hand(mine):
    """A layer of 160^3, narrow forward and dx, wide dw: each kernel takes the longer of its two times."""
    n, boxed = 160, 160 * 160 + 160 * 10
    workload = Workload("one", (Gemm("l", n, n, n),), tokens=n)
    floor = roofs(workload, Precision(8, 8, 8, 16), mine)["fc"]
    forward_bytes, backward_bytes = 4 * boxed, 3 * boxed + 2 * (2 * n * n + 160 * 10) + 4 * n * n
    forward = max(2 * n**3 / 4e12, forward_bytes / 100e9)
    backward = max(2 * n**3 / 4e12 + 2 * n**3 / 1e12, backward_bytes / 100e9)
    assert floor.bytes == forward_bytes + backward_bytes
    assert floor.flops == 6 * n**3
    assert floor.seconds == pytest.approx(forward + backward)
    assert floor.intensity == pytest.approx(6 * n**3 / (forward_bytes + backward_bytes))
    assert floor.memory_bound == (floor.intensity < floor.ridge)


def test_bound_changes_at_the_ridge(mine):
    small, large = (
        roofs(Workload("one", (Gemm("l", n, n, n),), tokens=n), Precision(8, 8, 8, 8), mine)["fc"] for n in (32, 2048)
    )
    assert small.memory_bound
    assert small.intensity < small.ridge
    assert not large.memory_bound
    assert large.intensity > large.ridge
    assert large.ridge == pytest.approx(4e12 / 100e9)


def test_classes_and_datatypes(mine):
    workload = Workload(
        "two",
        (
            Gemm("l", 4, 4, 4),
            Gemm("s", 4, 4, 4, cls="attention", weight=False, quantised=False),
            Pointwise("n", "norm", 4, 4),
        ),
        tokens=4,
    )
    assert list(roofs(workload, Precision(8, 8, 8, 16), mine)) == ["attention", "fc", "other"]
    found = products(workload, Precision(8, 8, 8, 16), "bfp")
    assert datatypes(found, "fc", mine) == "narrow, wide"
    assert datatypes(found, "attention", mine) == "wide"
    assert datatypes(found, "other", mine) == ""
