# Each target makes what it needs: a virtual environment in .venv, the model in the user's cache.
# STRETTO_PYTHON chooses the Python that makes the environment.
STRETTO_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test lint chaos fuzz soak format clean

help:
	@echo "make demo    install, pull a small model, and train it on the arithmetic example (about 10 minutes on 2 cores)"
	@echo "make test    install with the development tools, then lint, type-check and run all tests"
	@echo "make lint    ruff and mypy alone"
	@echo "make chaos   kill and stop the services of a run 200 times, and receivers of weights 50 times (20 minutes)"
	@echo "make fuzz    send a million mutated messages (about 10 minutes)"
	@echo "make soak    50,000 steps of an emulated model: no service may grow (about 20 minutes)"
	@echo "make format  let ruff format the code"
	@echo "make clean   remove the environment and the runs"

$(VENV)/.cpu: pyproject.toml
	@echo "== making the virtual environment $(VENV) with stretto[cpu] (a few minutes the first time)"
	$(STRETTO_PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[cpu]'
	@touch $@

$(VENV)/.dev: $(VENV)/.cpu
	@echo "== adding the development tools"
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[cpu,dev]'
	@touch $@

demo: $(VENV)/.cpu
	@echo "== pulling SmolLM2-135M-Instruct (93 MB the first time)"
	$(BIN)/stretto models pull smollm2-135m
	@echo "== training it to add: held-out accuracy is shown every 20 steps"
	$(BIN)/stretto train examples/arithmetic/config.yaml

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	@echo "== running the tests"
	$(BIN)/python -m pytest -q

chaos: $(VENV)/.dev
	$(BIN)/python tests/chaos/chaos.py --faults 200
	$(BIN)/python tests/chaos/transports.py --repetitions 50

fuzz: $(VENV)/.dev
	$(BIN)/python tests/protocol/fuzz.py --messages 1000000

soak: $(VENV)/.dev
	$(BIN)/python tests/soak/soak.py --steps 50000 --json runs/soak.json

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs
