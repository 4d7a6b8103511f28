# Everything a fresh machine needs: Python (3.10 to 3.13) and make.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export TOKENIZERS_PARALLELISM = false

.PHONY: quickstart test test-energon test-long lint clean

# The stamp makes `make` install again when the metadata or the pins change, and only then.
$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[test,lora]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python tools/quickstart.py

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

# Streams inside Megatron-Energon and torchdata, which are optional: real packages, real tars.
$(VENV)/.installed-energon: $(VENV)/.installed
	$(PIP) -e '.[energon]' torchdata
	touch $@

test-energon: $(VENV)/.installed-energon
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long tests/integrations \
		tests/datasets/test_pool_resume.py

test-long: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) work_dirs build dist *.egg-info
