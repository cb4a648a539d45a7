"""dsq-cost, and python -m dsq.costmodel."""

import signal
import sys
from importlib import import_module


def main() -> int:
    """Run dsq-cost on the command line's arguments. Ctrl-C while it is imported ends it without a traceback."""
    usual = signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = import_module("dsq.costmodel.cli.main")
    signal.signal(signal.SIGINT, usual)
    return int(command.main())


if __name__ == "__main__":
    sys.exit(main())
