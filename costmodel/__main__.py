"""dsq-cost, and python -m dsq.costmodel."""

import sys

from dsq.costmodel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
