"""What a finished run cost by the cost model: its own model's shapes, its own work at each level."""

from pathlib import Path

from costmodel.cli.commands import estimate
from costmodel.cli.main import parser


def costs(history: Path) -> dict[str, dict[str, float]]:
    """profile -> arithmetic and dram of the run, relative to fixed-point 32: `dsq-cost estimate --history ...`."""
    found = {}
    for profile in ("first-principles", "paper"):
        given = ["estimate", "--history", str(history), "--profile", profile]
        mean = estimate.run(parser().parse_args(given)).sections[0].records[-1]
        found[profile] = {name: mean[name] for name in ("arithmetic", "dram")}
    return found
