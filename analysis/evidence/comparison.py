"""The table of the suite: by how much each setting differs from fp32 of the same seed, and from bf16 autocast."""

from analysis import ROOT

PAGE = ROOT / "docs" / "evidence.md"


def page(*_):
    return ""
