# make train    set up $(VENV) and train configs/quickstart.py on 8 simulated devices
# make test     set up $(VENV) and run the quick tests; make test-all adds the full sweeps
# make lint     ruff, pyright, codespell
#
# PYTHON chooses the interpreter (3.11 or newer), VENV the folder, EXTRAS what is installed besides,
# ARGS what is passed on:  make train ARGS="--config.steps=50"   make test ARGS="-k mesh"

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
ARGS ?=

BIN := $(VENV)/bin
comma := ,
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.PHONY: install train test test-all lint format clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "jaxpar needs Python 3.11 or newer; choose one with: make PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing jaxpar[$(EXTRAS)] into $(VENV); the first time takes a few minutes"
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

train: $(STAMP)
	$(BIN)/python scripts/train.py --config=configs/quickstart.py --workdir=runs/quickstart --devices=8 $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "sweep or not sweep" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/codespell

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
