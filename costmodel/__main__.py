"""python -m costmodel is dsq-cost."""

import sys

from costmodel.cli.main import main

sys.exit(main())
