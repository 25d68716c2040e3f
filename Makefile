# Everything a fresh machine needs: Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

# Tests that compute and start nothing: one core's work, beside those that mostly wait for processes.
PURE := $(addprefix tests/,specs memory/foreign planning scheduling)

.PHONY: demo demo-audio test test-pure test-world test-long lint bench bench-memory bench-cost bench-gpu bench-scheduler clean

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

demo: $(READY)
	$(BIN)/python -m jobs.demo.run

demo-audio: $(READY)
	$(BIN)/python -m jobs.audio.run

test: $(READY) lint
	$(MAKE) --no-print-directory --jobs=2 test-pure test-world

test-pure:  # tells everything at its end, so that the dots of the other do not mix with its own
	@said=$$($(BIN)/python -m pytest -m "not long" $(PURE) 2>&1); code=$$?; echo "$$said"; exit $$code

test-world:
	$(BIN)/python -m pytest -m "not long" --durations=25 $(addprefix --ignore=,$(PURE)) tests

test-long: $(READY)
	$(BIN)/python -m pytest -m long

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m tests.bench

bench-memory: $(READY)
	$(BIN)/python -m tests.bench memory published

bench-cost: $(READY)
	$(BIN)/python -m tests.bench cost

bench-gpu: $(READY)  # on a machine with a CUDA device
	$(BIN)/python -m tests.gpu.measure .bench/gpu.jsonl

bench-scheduler: $(READY)
	$(BIN)/python -m tests.bench scheduler fairness journal

clean:
	rm -rf $(VENV) .bench .demo build *.egg-info
