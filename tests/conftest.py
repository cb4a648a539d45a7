"""Tests take the first GEMM that fits, whichever is the fastest here, and leave alone what is kept about that."""

import os
import tempfile

os.environ["DSQ_GEMM"] = "the first"
os.environ["DSQ_CACHE"] = tempfile.mkdtemp(prefix="dsq-tests-")
