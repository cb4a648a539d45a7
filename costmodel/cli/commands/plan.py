"""dsq-cost plan: does it fit, how fast is it, what bounds it, what would help."""

import argparse
import re
from functools import partial

from costmodel.cli.answer import Answer, Section, heading, refuse_idle, setups_of
from costmodel.cli.pictures.plan import draw_page, draw_picture
from costmodel.hardware.hardware import load_hardware
from costmodel.model.methods import Method, all_sizes
from costmodel.planning.plan import ASKED, NF4_BITS, Question
from costmodel.workloads.named import asked
from dsq.command import write_whole

_UNITS = {"mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SHOWN = {"method": "", "peak_GB": ",.2f", "fits": "", "largest_batch": ",", "step_ms": ",.1f", "step_ms_low": ",.1f"}
_SHOWN |= {"step_ms_high": ",.1f", "bound": "", "tokens/s": ",.0f"}


def run(arguments: argparse.Namespace) -> Answer:
    precisions = _sort(arguments)
    if arguments.lora is not None and arguments.qlora is not None:
        raise ValueError("give --lora or --qlora, not both: --qlora has a rank of its own")
    question = Question(
        step=asked(**vars(arguments) | {"lora": arguments.lora if arguments.qlora is None else arguments.qlora}),
        hardware=load_hardware(arguments.hardware),
        methods=tuple(Method(str(setup), setup) for setup in setups_of(arguments, precisions)),
        budget=parse_bytes(arguments.fit) if arguments.fit else 0,
        base_bits=0 if arguments.qlora is None else NF4_BITS,
        **{name: getattr(arguments, name) for name in ASKED},
    )
    plan = question.ask()
    for path, draw in ((arguments.picture, draw_picture), (arguments.html, draw_page)):
        if path:
            write_whole(path, partial(draw, plan=plan))
    data = plan.as_dict()
    records, notes = data.pop("methods"), data.pop("notes")
    shown = _SHOWN if question.sized else {name: spec for name, spec in _SHOWN.items() if name != "largest_batch"}
    section = Section("methods", heading(plan.workload, question.hardware), records, shown)
    return Answer([section], notes, data, lead=plan.answer)


def _sort(arguments: argparse.Namespace) -> list[str]:
    """The words that are precisions; another one is the workload's name. Raises ValueError."""
    precisions = [word for word in arguments.words if any(bracket in word for bracket in "[]:")]
    names = [word for word in arguments.words if word not in precisions]
    if arguments.workload != arguments.parser.get_default("workload"):
        names.append(arguments.workload)
    if len(names) > 1:
        given = " and ".join(map(repr, names))
        raise ValueError(f"workload is given twice: {given}; a precision is written as in [8,4,8,8]")
    arguments.workload = names[0] if names else arguments.workload
    if not precisions:
        refuse_idle(arguments, ("format", "box_axis", "container", *all_sizes()), "without a precision")
    return precisions


def parse_bytes(text: str) -> float:
    """'80GB' -> 80e9. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MGT]i?B)", text, re.IGNORECASE)
    if not match or not float(match[1]):
        raise ValueError(f"fit must be a size such as 80GB or 24GiB, got {text!r}")
    return float(match[1]) * _UNITS[match[2].lower()]
