"""No test reads or writes what this machine has kept about its GEMMs."""

import os
import tempfile

os.environ["DSQ_CACHE"] = tempfile.mkdtemp(prefix="dsq-tests-")
