# Everything a fresh machine needs: Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
USED := $(VENV)/.installed-for-use
READY := $(VENV)/.installed
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

# Tests that compute and start nothing, those that train or trace in processes of their own, those of the service and
# its commands, and the others: three kinds at a time, since each waits for its processes; the longest first. Types are
# checked beside them: mypy without its cache takes 110 s of one core.
PURE := $(addprefix tests/,specs planning scheduling)
TRAINED := $(addprefix tests/,audio fake_card gpu memory training)
SERVED := $(addprefix tests/,service k8s) $(wildcard tests/test_*.py)
PYTEST := PYTHONHASHSEED=0 $(BIN)/python -m pytest -m "not long and not cluster"

.PHONY: constraints demo demo-audio seeds test test-pure test-trained test-served test-others test-long test-oldest-torch test-cluster chaos night lint docs bench bench-memory bench-cost bench-gpu gpu-rehearsal bench-scheduler bench-recovery bench-compare release clean

$(USED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) .
	touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) '.[test]'
	touch $@ $(USED)

constraints: $(READY)  # after an upgrade that the tests have passed
	{ grep '^#' constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt

demo: $(USED)
	$(BIN)/orc demo --all

demo-audio: $(READY)
	$(BIN)/python -m jobs.audio.run

# Five projects' own scripts, from the checkouts in the folder SEEDS, whose environments are built there
seeds: $(READY)
	$(BIN)/python -m tests.seeds

test: $(READY)
	$(MAKE) --no-print-directory --jobs=3 test-served test-trained test-others lint test-pure

test-served:
	$(PYTEST) $(SERVED)

test-others:
	$(call told_at_its_end,$(PYTEST) $(addprefix --ignore=,$(PURE) $(TRAINED) $(SERVED)) tests)

test-trained:
	$(call told_at_its_end,$(PYTEST) $(TRAINED))

test-pure:
	$(call told_at_its_end,$(PYTEST) $(PURE))

# so that the dots of several do not mix
told_at_its_end = @said=$$($(1) 2>&1); code=$$?; echo "$$said"; exit $$code

# Longer matrices, and new cases of every property; `make test-long SEED=...` with the printed seed draws them again.
SEED = $(eval SEED := $(shell date +%s))$(SEED)
test-long: $(READY)
	PYTHONHASHSEED=$(SEED) $(BIN)/python -m pytest -m "(long or hypothesis) and not cluster" \
		--hypothesis-profile=new --hypothesis-seed=$(SEED) \
		|| { echo "the same cases again: make test-long SEED=$(SEED)"; exit 1; }
	$(MAKE) --no-print-directory test-oldest-torch

# The other end of the torch that is supported, over what .venv has; 3 GB, since its wheel is that for CUDA
OLDEST := .venv.torch-2.11
test-oldest-torch: $(READY)
	$(BIN)/python -m venv $(OLDEST)
	if $(OLDEST)/bin/pip install --quiet --disable-pip-version-check 'torch==2.11.*' numpy; then \
		echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
			> $$(echo $(OLDEST)/lib/python*/site-packages)/newer.pth && \
		PYTHONHASHSEED=0 $(OLDEST)/bin/python -m pytest -m "not long and not cluster" tests/training tests/memory; \
	else echo "skipped: there is no wheel of torch 2.11 for this machine"; fi

# Four hosts as network namespaces: root, Linux, and a PostgreSQL
test-cluster: $(READY)
	PYTHONHASHSEED=0 $(BIN)/python -m pytest -m cluster -s --durations=0 tests/cluster

# Faults on the same hosts; `make chaos SEED=... FAULTS=... JOBS=...` draws the same ones again. None comes after LIMIT_S.
FAULTS = 1000
JOBS = 300
LIMIT_S = 20000
chaos: $(READY)
	PYTHONHASHSEED=0 $(BIN)/python -m tests.cluster.chaos --seed $(SEED) --faults $(FAULTS) --jobs $(JOBS) \
		--limit-s $(LIMIT_S)

# Drawn jobs and faults on one machine, and the laws of the morning; `make night SEED=... JOBS=... FAULTS=...` draws the
# same night again. Kinds whose library is absent are skipped: `pip install -c constraints.txt '.[night]'`.
night: JOBS = 12
night: FAULTS = 4
night: $(READY)
	PYTHONHASHSEED=0 $(BIN)/python -m tests.night.night --seed $(SEED) --jobs $(JOBS) --faults $(FAULTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

docs: $(READY)  # the generated pages of docs/reference, and the site in build/site
	$(BIN)/python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python -m benchmarks

bench-memory: $(READY)
	$(BIN)/python -m benchmarks memory published

bench-cost: $(READY)
	$(BIN)/python -m benchmarks cost experts

bench-gpu: $(READY)  # on a machine with a CUDA device
	$(BIN)/python -m tests.gpu.measure .bench/gpu.jsonl

gpu-rehearsal: $(READY)  # of what tests/gpu/kit does on a machine with a GPU; root, or user namespaces
	$(BIN)/python -m tests.gpu.kit.rehearse

bench-scheduler: $(READY)
	$(BIN)/python -m benchmarks scheduler fairness journal

bench-recovery: $(READY)
	$(BIN)/python -m benchmarks recovery

bench-compare: $(READY)
	$(BIN)/python -m benchmarks compare

release: $(READY)  # a tag of this commit, where nothing is missing; CONTRIBUTING.md has the steps before
	$(BIN)/python -m tests.releases.tag

clean:
	rm -rf $(VENV) .bench .demo orc-demo build *.egg-info
