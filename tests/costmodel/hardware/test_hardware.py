"""Hardware profiles."""

import re
import tomllib
from pathlib import Path

import pytest

from dsq import costmodel
from dsq.costmodel.fields import Fields
from dsq.costmodel.hardware import hardware as profiles
from dsq.costmodel.hardware.hardware import Energy, FusedUnit, Pass, load_hardware, profile_names
from dsq.formats import BFP, FixedPoint, Identity, parse_format

MACHINE = """
name = "mine"
[bandwidth]
gb_per_s = 100
source = "measured"
[vector]
tflops = 0.1
source = "measured"
"""
MINE = f"""{MACHINE}
[[peak]]
datatype = "wide"
tflops = 1
holds = {{ bfp = 32, fixed = 32, float = 32 }}
source = "measured"
[[peak]]
datatype = "narrow"
tflops = 4
holds = {{ bfp = 8 }}
source = "measured"
"""


def read(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return load_hardware(str(path))


@pytest.fixture
def mine(tmp_path):
    return read(tmp_path, MINE)


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_runs_fp32_names_its_sources_and_reaches_at_most_the_stated_rates(name):
    hardware = load_hardware(name)
    assert all(hardware.rate(operand, operand).passes == 1 for operand in (BFP(32), FixedPoint(32), Identity(32)))
    assert all(hardware.sources.values())
    assert hardware.datasheet_bandwidth >= hardware.bandwidth
    for peak in hardware.peaks:
        assert peak.source
        assert peak.flops <= peak.datasheet_flops
        assert peak.flops == peak.datasheet_flops or "; efficiency " in peak.source
    assert ("estimated" in hardware.rates) == (not hardware.efficiency.overlaps) == (name != "msfp-accelerator")


@pytest.mark.parametrize("name", [name for name in profile_names() if load_hardware(name).memory_bytes])
def test_a_cards_memory_is_what_a_process_can_allocate(name):
    """What is reported of it, in GiB, MiB or bytes, less half a GB of a context."""
    hardware = load_hardware(name)
    source = hardware.sources["memory"]
    assert "half a GB" in source or source.startswith("assumed: as a")
    if reported := re.match(r"CUDA reports ([\d.]+) GiB", source):
        assert float(reported[1]) * 2**30 - hardware.memory_bytes == pytest.approx(0.5e9, abs=0.1e9)


def test_a_chip_that_states_no_step_reaches_its_roofline(tmp_path, mine):
    """No kernel waits for a launch, and plan prints the floor without a range."""
    assert (mine.efficiency.memory, mine.efficiency.overlaps, mine.moving(100e9)) == (1, True, 1)
    assert "a roofline" in mine.rates
    assert "takes at least" in costmodel.plan("gpt2", str(tmp_path / "mine.toml"), tokens=64, fit=80e9).answer
    step = read(tmp_path, MINE + "[step]\nefficiency = 0.5\n").efficiency
    assert (step.memory, step.overlaps) == (0.5, False)
    assert step.launch > 0


def names_another(profile, text):
    """Whether the source names a card that has another profile; h100-96gb is an H100, too."""
    others = [name for name in profile_names() if not f"{profile}-".startswith(f"{name}-")]
    cards = "|".join(name.replace("-", "[ -]?").replace("gb", "[ -]?gb") for name in others)
    return not text.startswith("assumed") and re.search(rf"\b({cards})\b", text, re.IGNORECASE) is not None


@pytest.mark.parametrize("name", profile_names())
def test_a_source_that_a_profile_inherits_names_no_other_card(name):
    text = (Path(profiles.__file__).parent / f"profiles/{name}.toml").read_text()
    tables = profiles._completed(Fields(tomllib.loads(text)))
    entries = [table for table in (*tables.values(), *tables["peak"]) if isinstance(table, dict)]
    sources = {table[key] for table in entries for key in ("source", "efficiency_source") if key in table}
    assert [source for source in sources if source not in text and names_another(name, source)] == []


def test_a_file_changes_the_profile_that_it_is_like(tmp_path):
    text = """
like = "rtx-4090"
name = "mine"
source = "a datasheet"
memory = { gb = 48, word_bits = 8 }
bandwidth = { gb_per_s = 2016, efficiency = 0.5 }
peak = [{ datatype = "bf16", tflops = 100 }, { datatype = "fp8", tflops = 200, holds = { fp8_row = 8 } }]
"""
    base, changed = load_hardware("rtx-4090"), read(tmp_path, text)
    assert (changed.name, changed.memory_bytes, changed.memory_type) == ("mine", 48e9, "GDDR6X")
    assert (base.word, changed.word) == (0, 8)
    assert changed.rates.endswith("; converted layers' tensors in DRAM at their own bits, in words of 8")
    assert (changed.datasheet_bandwidth, changed.bandwidth) == (2016e9, 1008e9)
    assert (changed.link, changed.host, changed.efficiency) == (base.link, base.host, base.efficiency)
    assert changed.sources["link"] == base.sources["link"]
    assert changed.sources["memory"] == "a datasheet"
    rates = {peak.datatype: (peak.datasheet_flops, peak.source.partition(";")[0]) for peak in changed.peaks}
    assert [rates[name] for name in ("bf16", "fp8")] == [(100e12, "a datasheet"), (200e12, "a datasheet")]
    others = {peak.datatype: peak for peak in base.peaks if peak.datatype != "bf16"}
    assert {peak.datatype: peak for peak in changed.peaks if peak.datatype in others} == others


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("like = 1", "field like must be text"),
        ('like = "rtx-409"', "field unknown hardware 'rtx-409'"),
        ('like = "h100"\nsource = 1', "field source must be text"),
        ('like = "h100"', "field name is missing"),
        ('like = "h100"\nname = "mine"\npeak = [1]', "field peak\\[0\\].datatype is missing"),
        ('like = "h100"\nname = "mine"\nlink = 1', "field link.gb_per_s is missing"),
        ('like = "h100"\nname = "mine"\nmemory = { word_bits = -1 }', "field memory.word_bits must be .* got -1"),
        ('like = "h100"\nname = "mine"\npeak = [{ datatype = 1 }]', "field peak\\[0\\].datatype must be text"),
    ],
)
def test_a_file_that_is_like_a_profile_in_the_wrong_way_is_refused(tmp_path, text, error):
    with pytest.raises(ValueError, match=error):
        read(tmp_path, text)


def test_fastest_exact_way(mine):
    def way(m1, m2, template=BFP):
        return str(mine.rate(template(m1), template(m2)))

    assert [way(m, m) for m in (2, 8, 9, 32)] == ["narrow", "narrow", "wide", "wide"]
    assert [way(9, 8), way(16, 8), way(9, 9)] == ["2 x narrow", "3 x narrow", "wide"]  # 4 x narrow is as fast as wide
    assert way(4, 4, FixedPoint) == "wide"
    assert way(4, 4, Identity) == way(32, 4) == "wide"  # floats are not split
    assert mine.rate(BFP(4), BFP(4)).flops == 4e12
    assert mine.rate(BFP(16), BFP(8)).flops == 4e12 / 3


def test_a_unit_of_float32_multiplies_codes_too(tmp_path):
    """Codes of more than 16 bits are kept in float32, whose significand holds all narrower ones."""
    mine = read(tmp_path, MINE.replace("bfp = 32, fixed = 32, float = 32", "float = 32"))
    assert {str(mine.rate(fmt, fmt)) for fmt in (BFP(32), FixedPoint(32), FixedPoint(16), Identity(32))} == {"wide"}


def test_units_hold_formats_that_have_no_name(tmp_path):
    text = "grid:2,0,7.0,1x32,e8m0,even,0,1.0"
    mine = read(tmp_path, MINE.replace("holds = { bfp = 8 }", f'holds = {{ bfp = 4, "{text}" = 5 }}'))
    fmt = parse_format(text)
    assert str(mine.rate(fmt, fmt)) == "narrow"


def test_split_passes_on_each_accelerator():
    """16 x 2 bits take two bf16 products, 15 significand bits as 8 and 7 (A100: 312 / 2 = 156 TFLOP/s, against 19.5 of
    its fp32 cores). MSFP takes five parts of 3 bits on FP12 (286 / 5 = 57.2), for three of 7 bits on FP16 reach 47.7;
    for 16 x 16 bits its 16 x 16 unit (35.75), for nine FP16 passes reach 15.9."""
    h100, a100, msfp = (load_hardware(name) for name in ("h100", "a100-80gb", "msfp-accelerator"))
    for hardware, m1, m2, way, tera in (
        (h100, 16, 2, "2 x bf16", 494.7),
        (h100, 2, 16, "2 x bf16", 494.7),
        (h100, 9, 9, "bf16", 989.4),
        (h100, 16, 16, "4 x bf16", 247.35),
        (h100, 32, 2, "fp32", 66.9),
        (a100, 16, 2, "2 x bf16", 156),
        (a100, 16, 16, "4 x bf16", 78),
        (msfp, 16, 2, "5 x block-fp12", 57.2),
        (msfp, 16, 16, "4 x block-fp16", 35.75),
    ):
        rate = hardware.rate(BFP(m1), BFP(m2))
        assert str(rate) == way
        assert rate.peak.datasheet_flops / rate.passes == pytest.approx(tera * 1e12)
    assert h100.rate(BFP(16), BFP(2)).flops == 0.80 * 989.4e12 / 2


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("h100", {"fp8_tensor fp8_e5m2_tensor": "fp8", "fp8_1x128 fp8_128x128": "fp8", "mxfp8 mxfp8": "bf16"}),
        (
            "b200",
            {"mxfp8:rceil mxfp8_e5m2": "fp8", "mxfp6 mxfp6": "fp6", "mxfp4_aws mxfp4": "fp4", "mxfp4 mx9": "bf16"},
        ),
        ("b300", {"nvfp4 nvfp4_2d": "nvfp4", "nvfp4 mxfp4": "bf16"}),
        ("mi355x", {"mxfp4 mxfp4": "fp4", "nvfp4 nvfp4": "bf16", "int8_row int8_tensor": "int8"}),
    ],
)
def test_units_of_a_named_format_multiply_it_whatever_its_scale_rule_and_rows(name, products):
    hardware = load_hardware(name)
    ways = {pair: str(hardware.rate(*map(parse_format, pair.split()))) for pair in products}
    assert ways == products


MEASURED = f"""
measured = "today"
{MACHINE}
[[peak]]
datatype = "16 x 4 bits"
tflops = 0.3
ns_per_value = 0.5
us_per_call = 20
holds = {{ bfp = [16, 4] }}
source = "measured"
[[peak]]
datatype = "fp32"
tflops = 0.1
holds = {{ bfp = 32, float = 32 }}
source = "measured"
attention = {{ tflops = 0.05, ns_per_value = 2, causal = 0.9 }}
[[pass]]
kind = "relu"
bits = 32
phase = "forward"
ns_per_value = 0.25
us_per_call = 2
"""


def test_a_measured_peak_is_a_kernel(tmp_path):
    """It holds a wider and a narrower operand, in either order, and splits nothing."""
    measured = read(tmp_path, MEASURED)
    ways = [str(measured.rate(BFP(m1), BFP(m2))) for m1, m2 in ((16, 4), (4, 16), (4, 4), (16, 8), (16, 16))]
    assert ways == ["16 x 4 bits", "16 x 4 bits", "16 x 4 bits", "fp32", "fp32"]
    assert measured.rate(BFP(16), BFP(4)).seconds(3e11, 1e9, 5) == pytest.approx(1 + 0.5 + 5 * 20e-6)
    assert measured.passes["relu", 32, "forward"].per_value == pytest.approx(0.25e-9)
    assert "today" in measured.rates
    fused = measured.rate(Identity(32), Identity(32)).peak.attention
    assert fused == FusedUnit(flops=0.05e12, around=Pass(2e-9), causal=0.9)


@pytest.mark.parametrize(
    "line, replacement, message",
    [
        ("gb_per_s = 100", "", r"field bandwidth\.gb_per_s is missing"),
        ("gb_per_s = 100", "gb_per_s = -1", r"field bandwidth\.gb_per_s must be a number in \[1e-30, 1e\+30\]"),
        ('datatype = "narrow"', "", r"field peak\[1\]\.datatype is missing"),
        ("holds = { bfp = 8 }", "holds = 8", r"field peak\[1\]\.holds must be a table"),
        ("holds = { bfp = 8 }", "holds = { int = 8 }", r"field peak\[1\]\.holds\.int must be"),
        ("holds = { bfp = 8 }", "holds = { bfp = [8, 4, 2] }", r"field peak\[1\]\.holds\.bfp must be"),
        (
            "tflops = 4",
            "tflops = 4\nefficiency = 2",
            r"field peak\[1\]\.efficiency must be a number in \[1e-30, 1\], got 2",
        ),
        ("gb_per_s = 100", "gbps = 100", r"field gbps is not known; nearest is .*\[bandwidth\] has gb_per_s, source"),
        ("tflops = 4", "tflop = 4", r"field tflop is not known; nearest is 'tflops'; \[peak\] has datatype"),
        ("[vector]", "[vectors]", r"field vectors is not known; nearest is 'vector'; a file has name, cpu"),
    ],
)
def test_bad_hardware_file_names_the_field(line, replacement, message, tmp_path):
    assert line in MINE
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, MINE.replace(line, replacement, 1))
    assert str(tmp_path / "mine.toml") in str(error.value)


ENERGY = "[energy]\ndram_pj_per_byte = 160\nmac_pj = { narrow = 0.5, wide = 2 }\n"


def test_all_that_a_file_lacks_is_named_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"field name, vector.tflops, peak\[0\].tflops are missing"):
        read(tmp_path, 'bandwidth = { gb_per_s = 1 }\npeak = [{ datatype = "a", holds = { float = 16 } }]')
    with pytest.raises(ValueError, match=r"peak\[0\]\.datatype, .* are missing"):
        read(tmp_path, MACHINE)


def test_energy_is_stated_of_dram_and_of_each_datatype(tmp_path, mine):
    energy = read(tmp_path, MINE + ENERGY).energy
    assert (energy.dram, energy.sram, energy.macs["narrow"]) == (160e-12, 0, 0.5e-12)
    assert mine.energy is None
    with pytest.raises(ValueError, match=r"energy\.mac_pj\.int8 must be the datatype of a peak: wide, narrow"):
        read(tmp_path, MINE + ENERGY.replace("narrow", "int8"))
    with pytest.raises(ValueError, match=r"energy\.dram_pj_per_byte is missing"):
        read(tmp_path, MINE + ENERGY.replace("dram_pj_per_byte", "sram_pj_per_byte"))


def test_the_recipe_of_a_profile_is_a_file_as_it_stands(tmp_path):
    page = (Path(__file__).parents[3] / "docs/extending.md").read_text()
    recipe = page.partition("## A hardware profile")[2].partition("```toml\n")[2].partition("```")[0]
    hardware = read(tmp_path, recipe)
    assert (hardware.name, hardware.memory_bytes) == ("My card", 48e9)


def test_the_pages_listing_is_a_file_as_it_stands(tmp_path):
    page = (Path(__file__).parents[3] / "docs/cost-model.md").read_text()
    minimal, listing = re.findall(r"```toml\n(.*?)```", page.partition("## A hardware file")[2], re.DOTALL)
    assert len(minimal.splitlines()) <= 10
    chip = read(tmp_path, minimal)
    assert (chip.sram, chip.memory_bytes, chip.efficiency) == (48e6, 64e9, profiles.ROOFLINE)
    assert costmodel.plan("gpt2", str(tmp_path / "mine.toml"), tokens=64).best.fits
    hardware = read(tmp_path, listing)
    assert hardware.node == 8
    assert hardware.sources["link"] == "not stated"
    # Horowitz, ISSCC 2014, figure 1.1.9: pJ of 64 bits of DRAM and of 1 MB of cache, of a product and a sum
    assert hardware.energy == Energy(1300e-12 / 8, 100e-12 / 8, {"fp32": 4.6e-12, "bf16": 1.5e-12})
    assert costmodel.plan("gpt2", str(tmp_path / "mine.toml"), tokens=64).best.fits


def test_a_format_the_hardware_lacks_is_named(tmp_path):
    narrow = read(tmp_path, MINE.replace("holds = { bfp = 32, fixed = 32, float = 32 }", "holds = { bfp = 16 }"))
    with pytest.raises(ValueError, match="no peak that holds bfp operands of 32 bits"):
        narrow.rate(BFP(32), BFP(4))


@pytest.mark.parametrize(
    ("full", "profile"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("H100 SXM", "h100"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA L40", "l40"),
        ("4090", "rtx-4090"),
        ("h100-80gb", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
    ],
)
def test_a_device_is_known_by_its_full_name(full, profile):
    """torch.cuda.get_device_name gives these names."""
    assert load_hardware(full) == load_hardware(profile)


@pytest.mark.parametrize("name", ["a100", "h2", "rtx-409", "l4s"])
def test_a_part_of_a_number_is_no_device(name):
    with pytest.raises(ValueError, match=f"unknown hardware '{name}'"):
        load_hardware(name)
