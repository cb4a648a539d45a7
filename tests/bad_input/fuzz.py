"""Files of odd values to every command that reads one: python -m tests.bad_input.fuzz --minutes 10 (part of .ci/fuzz).

Each case is drawn from its number alone: ``--first NUMBER --minutes 0`` repeats it. A command ends within ten seconds,
with status 0 and finite numbers, or with status 2 and one line of at most 1,200 characters; never with a traceback. To
what is no JSON, no TOML and no file tests/dsq/test_command.py sees.
"""

import argparse
import contextlib
import copy
import io
import json
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from analysis import ROOT
from dsq.costmodel.cli import main as cost

SECONDS = 10
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 2}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100}
LLAMA |= {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "default"}}
GEMM = {"op": "gemm", "name": "fc", "M": 64, "K": 32, "N": 16}
POINTWISE = {"op": "pointwise", "name": "norm", "kind": "norm", "rows": 64, "width": 32}
JSON: dict[str, Any] = {
    "gpt2": {**GPT2, "vocab_size": 100, "n_positions": 128},
    "llama": LLAMA,
    "workload": {"costmodel": 1, "name": "mine", "tokens": 64, "operations": [GEMM, POINTWISE]},
}
HARDWARE = (ROOT / "costmodel" / "hardware" / "profiles" / "h100.toml").read_text(encoding="utf-8")
LONG = "x" * 100_000
ODD = (None, True, -1, 0, 1, 7.5, 1e308, 1e-308, 10**30, "", "x", LONG, [], {}, [[]], [None], {"a": 1}, float("nan"))


def _mutated(draw: random.Random, data: Any) -> Any:
    """A copy in which some values are odd, gone, or somewhere else."""
    data = copy.deepcopy(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = data
        while isinstance(at, dict | list) and at:
            key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if draw.random() < 0.5 or not isinstance(at[key], dict | list):
                if draw.random() < 0.2:
                    del at[key]
                else:
                    at[key] = copy.deepcopy(draw.choice(ODD))
                break
            at = at[key]
    return data


def _toml(draw: random.Random, text: str) -> str:
    """Numbers and texts of the file changed."""
    odd = ("inf", "-1", "0", "1e308", "1e-320", '"x"', "[]", "true", "{}", "nan", f'"{LONG}"', "1979-05-27")
    return re.sub(r"(?<== )[^\n]+", lambda match: draw.choice(odd) if draw.random() < 0.1 else match[0], text)


def _command(draw: random.Random, folder: Path) -> list[str]:
    kind = draw.choice([*JSON, "hardware"])
    path = folder / f"{kind}.{'toml' if kind == 'hardware' else 'json'}"
    path.write_text(_toml(draw, HARDWARE) if kind == "hardware" else json.dumps(_mutated(draw, JSON[kind])))
    if kind == "hardware":
        question = draw.choice((["estimate", "[4,4,4,16]"], ["plan"], ["roofline", "[4,4,4,16]"]))
        return [*question, "--hardware", str(path)]
    question = draw.choice((["estimate", "[4,3,3,8]"], ["plan"], ["roofline", "[8,4,4,8]"]))
    return [*question, "--workload", str(path), *draw.choice(([], ["--json"], ["--hardware", "h100"]))]


def case(number: int, folder: Path) -> str | None:
    """Say why the answer to the case is wrong; None: it is right."""
    draw = random.Random(number)
    arguments = _command(draw, folder)
    out, error = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status: Any = cost.main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    except BaseException as caught:
        return f"{' '.join(arguments)}: {type(caught).__name__}: {str(caught)[:300]}"
    finally:
        signal.alarm(0)
    output = error.getvalue()
    if status == 0 and not re.search(r"\b(nan|inf|NaN|Infinity)\b", out.getvalue()):
        return None
    if status == 2 and output.count("\n") == 1 and len(output) <= 1200:
        return None
    return f"{' '.join(arguments)}: status {status}, {out.getvalue()[-200:]!r}, {output[:300]!r}"


def _too_long(*_: object) -> None:
    raise TimeoutError(f"longer than {SECONDS} seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    end, number, wrong = time.monotonic() + 60 * arguments.minutes, arguments.first, 0
    while number == arguments.first or time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            if fault := case(number, Path(folder)):
                print(f"case {number}: {fault}", flush=True)
                wrong += 1
        number += 1
    print(f"{number - arguments.first} files, {wrong} answered wrongly")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
