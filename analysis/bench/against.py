"""This tree against another checkout, timed in alternating processes.

    python -m analysis.bench.against /path/to/other/checkout [--parts step kernels tiny] [--rounds 5]

Both trees need their kernels built (python setup.py build_ext --inplace). A round starts one process for this tree and
two for the other, each of which imports its own tree and nothing else of either, in an order that moves on by one each
round. A process gives the least time of several turns of each call; a ratio is the median over the rounds of (this
tree's time / the other's of the same round), its spread the least and the greatest of them. The other tree's second
process gives the ratio of that tree to itself: what lies within its spread is noise. About 6 minutes on two idle cores.

step      forward and backward of six encoder blocks, d 512, 1,024 tokens
kernels   dsq.quantize, dsq.pack and unpack of 2^18, 2^20 and 2^24 float32 values
tiny      forward and backward of one 64 x 64 layer with 32 tokens
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve()
THREADS = 2
#: a turn repeats its call until it takes about this long; the least of this many turns counts
TURN_SECONDS, TURNS = 0.02, 5
#: a ratio above this is marked
SLOWER = 1.03

Call = Callable[[], object]
Times = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.bench.against", description="This tree against another.")
    parser.add_argument("other", type=Path, help="root of the other checkout, its kernels built")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.parts, options.other)))
        return 0
    other = options.other.resolve()
    if not (other / "dsq").is_dir():
        parser.error(f"{options.other}: no checkout of dsq")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    report(*alternate(HERE.parents[2], other, options.parts, options.rounds))
    return 0


# ---- the parent ----


def alternate(new: Path, old: Path, parts: list[str], rounds: int) -> tuple[list[Times], list[Times], list[Times]]:
    """Times by round of the new tree, the old one, and the old one again."""
    trees, times = (new, old, old), ([], [], [])
    for turn in range(rounds):
        for place in range(3):
            who = (turn + place) % 3
            times[who].append(run_worker(trees[who], parts))
        print(f"round {turn + 1} of {rounds} done", file=sys.stderr, flush=True)
    return times


def run_worker(tree: Path, parts: list[str]) -> Times:
    """Times of one process that imports dsq from ``tree``. Raises RuntimeError where it fails."""
    # -P: the folder of this file holds modules of other names
    command = [sys.executable, "-P", str(HERE), str(tree), "--worker", "--parts", *parts]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process in {tree} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def report(new: list[Times], old: list[Times], again: list[Times]) -> None:
    """Print the table, and how many ratios lie above SLOWER."""
    width = max(map(len, old[0]))
    print(f"{'':{width}}    old ms    new ms   new/old  spread         old/old  spread")
    slower = 0
    for name in old[0]:
        ratios, control = _ratios(name, new, old), _ratios(name, again, old)
        mark = " slower" if median(ratios) > SLOWER else ""
        slower += bool(mark)
        times = (f"{median(t[name] for t in tree) * 1e3:10.3f}" for tree in (old, new))
        print(f"{name:{width}}{''.join(times)}   {_text(ratios)}   {_text(control)}{mark}")
    print(f"{slower} of {len(old[0])} ratios above {SLOWER}; {len(new)} rounds, {THREADS} threads")


def _ratios(name: str, tree: list[Times], old: list[Times]) -> list[float]:
    return [mine[name] / base[name] for mine, base in zip(tree, old, strict=True)]


def _text(ratios: list[float]) -> str:
    return f"{median(ratios):7.3f}  {min(ratios):.3f}-{max(ratios):.3f}"


# ---- the worker: the public names of dsq alone ----


def measure(parts: list[str], tree: Path) -> Times:
    """Seconds a call of every call of ``parts``. Raises RuntimeError where dsq is not that of ``tree``."""
    import torch

    import dsq

    if not Path(dsq.__file__).resolve().is_relative_to(tree.resolve()):
        raise RuntimeError(f"dsq comes from {dsq.__file__}, not from {tree}")
    keep_freed_memory()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    return {f"{part}: {name}": least(call) for part in parts for name, call in PARTS[part]()}


def least(call: Call) -> float:
    """Least seconds a call over TURNS turns, after a call that does not count; a slow call has fewer turns."""
    call()
    once = _turn(call, 1)
    repeats = max(1, round(TURN_SECONDS / max(once, 1e-7)))
    return min(_turn(call, repeats) for _ in range(TURNS if once < 0.3 else 2))


def _turn(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def keep_freed_memory() -> None:
    """Tell glibc to give nothing back: fresh pages cost up to a fifth of a step, or nothing, as luck has it."""
    with suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-4, 0)  # M_MMAP_MAX


def step() -> Iterator[tuple[str, Call]]:
    """Forward and backward of six pre-LN encoder blocks: in fp32, and converted at three precisions."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    import dsq

    class Block(nn.Module):
        """x + attention(norm(x)), then x + ffn(norm(x)); x (B, T, D)."""

        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
            self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x_BTD: Tensor) -> Tensor:
            h_BTD = self.norm1(x_BTD)
            split = (f(h_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
            y_BHTd = F.scaled_dot_product_attention(*split)
            x_BTD = x_BTD + self.out(y_BHTd.transpose(1, 2).flatten(2))
            return x_BTD + self.fc2(F.gelu(self.fc1(self.norm2(x_BTD))))

    x = torch.randn(8, 128, 512)
    for precision in ("fp32", "[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]"):
        model: nn.Module = nn.Sequential(*(Block(512, 8) for _ in range(6)), nn.LayerNorm(512))
        if precision != "fp32":
            dsq.convert(model, dsq.DSQConfig(levels=precision))

        def call(model: nn.Module = model) -> None:
            model(x).square().mean().backward()
            model.zero_grad()

        yield precision, call


def kernels() -> Iterator[tuple[str, Call]]:
    """What quantise, pack and unpack take, their allocations included."""
    import torch

    import dsq

    for power, columns in ((18, 512), (20, 512), (24, 4096)):
        x = torch.randn(2**power // columns, columns)
        for bits, axis in ((4, "columns"), (4, "rows"), (8, "columns"), (8, "rows")):
            fmt, dim = dsq.BFP(bits), -1 if axis == "columns" else 0
            where = f"2^{power}, {bits} bits, {axis}"
            for rounding in ("nearest", "stochastic") if bits == 4 else ("nearest",):
                how = (x, fmt, dim, rounding)
                yield f"quantize {where}, {rounding}", lambda how=how: dsq.quantize(*how)
                yield f"pack {where}, {rounding}", lambda how=how: dsq.pack(*how)
            yield f"unpack {where}", dsq.pack(x, fmt, dim).unpack


def tiny() -> Iterator[tuple[str, Call]]:
    """Forward and backward of one small layer, where what is not arithmetic shows."""
    import torch
    from torch import nn

    import dsq

    x = torch.randn(32, 64, requires_grad=True)
    layers: dict[str, nn.Module] = {"nn.Linear": nn.Linear(64, 64)}
    layers |= {p: dsq.Linear(64, 64, precision=p) for p in ("[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]")}
    for name, layer in layers.items():

        def call(layer: nn.Module = layer) -> None:
            layer(x).sum().backward()
            layer.zero_grad()

        yield name, call


PARTS: dict[str, Callable[[], Iterator[tuple[str, Call]]]] = {"step": step, "kernels": kernels, "tiny": tiny}

if __name__ == "__main__":
    sys.exit(main())
