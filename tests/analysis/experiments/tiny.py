"""A recipe of trainings that take seconds."""

from pathlib import Path

HEAD = """
title = "tiny"
[data]
kind = "parallel"
path = "no such folder"
target = "xx"
vocab = 60
beam = 1
[training]
cpu = true
encoder-layers = 1
decoder-layers = 1
encoder-embed-dim = 16
decoder-embed-dim = 16
encoder-ffn-embed-dim = 32
decoder-ffn-embed-dim = 32
encoder-attention-heads = 2
decoder-attention-heads = 2
max-tokens = 512
max-update = 30
max-epoch = 0
save-interval-updates = 1
keep-interval-updates = 1
log-interval = 1
"""
GRID = """
[options]
seed = [1, 2]
[[runs]]
levels = "none"
[[runs]]
levels = "[2,2,2,16] [16,4,4,16]"
format = ["bfp", "snvint"]
rise_at = 0.5
"""


def recipe(folder: Path, text: str) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text, encoding="utf-8")
    return path
