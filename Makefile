# Targets set up .venv by themselves, once. With an environment that is ready (torch 2.13, fairseq 0.12.2, the extras of
# pyproject.toml): make test PYTHON=/path/to/python. Sanitizers, emulators and fuzzers: .ci/README.md.

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

DATA ?= data
TIER ?= 1

.PHONY: help demo test lint docs wheel evidence
.DELETE_ON_ERROR:

help:
	@echo "make demo      train one translation model in fp32 and with DSQ: BLEU, memory, picture; 6 minutes on two CPU cores"
	@echo "make test      lint, types and all tests"
	@echo "make lint      ruff, mypy, import contracts, the files that forges and PyPI read"
	@echo "make docs      the documentation site, in site/; a dead link fails"
	@echo "make wheel     dist/: the wheel and the sdist, checked"
	@echo "make evidence  run the suite of real tasks where its ledger lacks rows, and write docs/evidence.md; DATA=../data TIER=1"

demo: $(RUN)
	rm -rf $(DEMO)
	$(PYTHON) -m analysis.translation.demo --out $(DEMO)

test: lint
	$(WHOLE) $(PYTHON) -m pytest -n auto --dist worksteal

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

evidence: $(DEV)
	$(PYTHON) -m analysis.evidence run --data $(DATA) --tier $(TIER)
	$(PYTHON) -m analysis.results_page

# torch first, so that nothing later chooses another; fairseq's own metadata no longer resolves, hence --no-deps, and it
# is built while the rest downloads. Editable: the C++ kernels are built in place, and the checkout is what runs.
$(VENV)/.run: pyproject.toml $(wildcard setup.py kernels/cpu/*.py kernels/cpu/src/* kernels/cpu/src/*/*)
	@test -n "$(BASE_PYTHON)" || { echo "no Python 3.11 or later found: make BASE_PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "setting up $(VENV): download PyTorch and fairseq, compile the kernels (2 to 5 minutes)"
	$(BASE_PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip wheel -qq --no-deps --wheel-dir $(VENV)/wheels fairseq==0.12.2 & fairseq=$$!; \
	$(VENV)/bin/python -m pip install -qq $(TORCH) && \
	$(VENV)/bin/python -m pip install -qq -e ".[fairseq,plots]" && \
	wait $$fairseq && \
	$(VENV)/bin/python -m pip install -qq --no-deps $(VENV)/wheels/fairseq-*.whl
	touch $@

# the extra "dev" by itself: installing the project again would compile the kernels again
$(VENV)/.dev: $(VENV)/.run
	@echo "setting up $(VENV) for tests: download the trainers and linters (1 to 3 minutes)"
	$(VENV)/bin/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["optional-dependencies"]["dev"], sep="\n")' > $(VENV)/dev.txt
	$(VENV)/bin/python -m pip install -qq $(TORCH) -r $(VENV)/dev.txt
	touch $@
