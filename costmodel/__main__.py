"""python -m costmodel is dsq-cost."""

import sys

from costmodel.cli import main

sys.exit(main())
