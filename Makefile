# make demo    one translation model trained twice, in fp32 and with DSQ: BLEU, memory, picture; under 6 minutes on two CPU cores
# make evidence the suite of real tasks: runs what its ledger lacks, and writes docs/evidence.md and the ledger's other tables; DATA=../data TIER=1
# make test    lint, types and all tests
# make soak    the tests that take minutes: the first hour, bytes that malloc holds, kills, failing allocations, every float32
# make sanitize the kernels' tests and some fuzzing under the sanitizers of addresses and undefined behaviour (GCC, Linux)
# make races   the same fuzzing under the sanitizer of data races (GCC, Linux)
# make arm     the kernels for ARM, cross-compiled and emulated, against the reference (Debian or Ubuntu)
# make avx512  the kernels for AVX-512, emulated on a machine without it, against the reference (Debian or Ubuntu)
# make gpu-compile  every GPU kernel compiled for nine GPUs that need not be there: hours of a core; PART=hot, minutes
# make fuzz    random calls of the kernels against the reference, and odd files to commands, MINUTES=1 each
# make lint    ruff, mypy, the contracts of imports, and the files that forges and PyPI read
# make docs    the documentation site, in site/; a dead link fails
# make wheel   dist/: the wheel and the sdist, checked
# make first-hour  install the wheel in an environment of its own and do there what a person does first
# make house   files and lines of Python by room, words of docs in prose and in tables
# make env     .venv with everything; the targets above make it by themselves, once
#
# With an environment that is ready (torch 2.13, fairseq 0.12.2, the extras in pyproject.toml):
#   make test PYTHON=/path/to/python

VENV := .venv
# the Python that makes .venv: 3.11 or later
BASE_PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
TORCH := torch==2.13.0
DEMO := runs/demo

ifdef PYTHON
else
PYTHON := $(VENV)/bin/python
RUN := $(VENV)/.run
DEV := $(VENV)/.dev
WHOLE := DSQ_WHOLE=1  # tests that skip for a missing package fail: this environment has them all
endif

MINUTES ?= 1
PART ?= all
DATA ?= data
TIER ?= 1
SANITIZED := build/sanitized
RACES := build/races

.PHONY: demo evidence test soak sanitize races arm avx512 gpu-compile fuzz lint docs wheel first-hour house env
.DELETE_ON_ERROR:

demo: $(RUN)
	rm -rf $(DEMO)
	$(PYTHON) -m analysis.translation.demo --out $(DEMO)

evidence: $(DEV)
	$(PYTHON) -m analysis.evidence run --data $(DATA) --tier $(TIER)
	$(PYTHON) -m analysis.results_page

test: lint
	$(WHOLE) $(PYTHON) -m pytest -n auto --dist worksteal

soak: $(DEV)
	$(WHOLE) $(PYTHON) -m pytest -m soak
	.ci/first-hour $(PYTHON)

# the sanitizers' own libraries come before Python's; leaks are Python's and PyTorch's own
sanitize: $(DEV)
	DSQ_SANITIZE=address,undefined $(PYTHON) setup.py -q build_ext --build-lib $(SANITIZED) --build-temp $(SANITIZED)
	export DSQ_NATIVE=$(CURDIR)/$(SANITIZED)/dsq/kernels/cpu/_native.so ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)"; \
	$(PYTHON) -m pytest tests/kernels/cpu tests/kernels/test_masks.py && \
	$(PYTHON) -m tests.kernels.fuzz --minutes $(MINUTES)

# on threads of their own (tests/kernels/threads.cpp): the sanitizer does not understand those of an OpenMP runtime
races: $(DEV)
	DSQ_SANITIZE=thread $(PYTHON) setup.py -q build_ext --build-lib $(RACES) --build-temp $(RACES)
	g++ -g -O1 -fPIC -shared -fsanitize=thread -o $(RACES)/threads.so tests/kernels/threads.cpp
	DSQ_NATIVE=$(CURDIR)/$(RACES)/dsq/kernels/cpu/_native.so LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)" \
		TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1" \
		$(PYTHON) -m tests.kernels.fuzz --minutes $(MINUTES) --threads $(RACES)/threads.so

arm: $(DEV)
	.ci/arm $(PYTHON)

avx512: $(DEV)
	.ci/avx512 $(PYTHON)

gpu-compile: $(DEV)
	$(PYTHON) -m analysis.gpu.compiled --part $(PART)

fuzz: $(DEV)
	$(PYTHON) -m tests.kernels.fuzz --minutes $(MINUTES)
	$(PYTHON) -m tests.bad_input.fuzz --minutes $(MINUTES)

lint: $(DEV)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	$(PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()" --no-logo
	$(PYTHON) -m validate_pyproject pyproject.toml
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

docs: $(DEV)
	$(PYTHON) -m mkdocs build --strict  # with --quiet no warning would count

wheel: $(DEV)
	rm -rf dist build/lib build/bdist.*
	$(PYTHON) -m build
	.ci/repair $(PYTHON) dist
	$(PYTHON) -m twine check --strict dist/*

first-hour:
	.ci/first-hour $(BASE_PYTHON)

house:
	@for room in dsq kernels costmodel fairseq_plugin analysis tests; do printf '%-15s %3d files %6d lines\n' $$room \
		"$$(git ls-files "$$room/*.py" | wc -l)" "$$(git ls-files "$$room/*.py" | xargs cat | wc -l)"; done
	@printf 'docs %14d words, and %d in tables\n' "$$(git ls-files 'docs/*.md' | xargs grep -hv '^|' | wc -w)" \
		"$$(git ls-files 'docs/*.md' | xargs grep -h '^|' | tr -d '|' | wc -w)"

env: $(DEV)

# torch first, so that nothing later chooses another; fairseq's own metadata no longer resolves, hence --no-deps, and it
# is built while the rest downloads. Editable: the C++ kernels are built in place, and the checkout is what runs.
$(VENV)/.run: pyproject.toml $(wildcard setup.py kernels/cpu/*.py kernels/cpu/src/* kernels/cpu/src/*/*)
	@test -n "$(BASE_PYTHON)" || { echo "no Python 3.11 or later found: make BASE_PYTHON=/path/to/python3" >&2; exit 2; }
	$(BASE_PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip wheel -qq --no-deps --wheel-dir $(VENV)/wheels fairseq==0.12.2 & fairseq=$$!; \
	$(VENV)/bin/python -m pip install -qq $(TORCH) && \
	$(VENV)/bin/python -m pip install -qq -e ".[fairseq,plots]" && \
	wait $$fairseq && \
	$(VENV)/bin/python -m pip install -qq --no-deps $(VENV)/wheels/fairseq-*.whl
	touch $@

# the extra "dev" by itself: installing the project again would compile the kernels again
$(VENV)/.dev: $(VENV)/.run
	$(VENV)/bin/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["optional-dependencies"]["dev"], sep="\n")' > $(VENV)/dev.txt
	$(VENV)/bin/python -m pip install -qq $(TORCH) -r $(VENV)/dev.txt
	touch $@
