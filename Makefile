# Everything the project does, from a machine with Python 3.11+, make, a compiler and the package registries.
# The environment is made once, and renewed when pyproject.toml or constraints.txt changes.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first Python that runs and is new enough; 3.11 first, because constraints.txt was tested with it. Choose with `make PYTHON=...`.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(if $(shell $(name) -c 'import sys, venv, ensurepip; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(name))))
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MPICH := $(VENV)/opt/mpich/.installed
# A second environment, of the newest torch and Python (decisions/0032).
PYTHON_NEWEST ?= python3.13
NEWEST := .venv-newest
TESTS ?=
# Seed of the tests' order and of their random numbers; pytest prints the seed of each run.
SEED ?=
# Number of processes that run tests: three on two cores, because tests often wait. A selection of tests runs in one.
WORKERS ?= $(if $(strip $(TESTS)),0,$(shell test "$$(getconf _NPROCESSORS_ONLN)" -ge 2 && echo 3 || echo 0))
# The quick tests hardly wait.
QUICK_WORKERS = $(if $(filter 0,$(WORKERS)),0,2)

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
	  echo "No Python 3.11 or newer (with venv) was found: install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; fi
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing what constraints.txt names into $(VENV); a minute or more the first time.'
	$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[all]'
	touch $@

# A second MPI for the tests. Its wheel and Open MPI's both hold bin/mpiexec, so it gets a separate prefix (decisions/0004).
$(MPICH): $(INSTALLED)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --prefix $(VENV)/opt/mpich mpich
	touch $@

.PHONY: install
install: $(INSTALLED) ## make the environment (.venv) and install the package into it

.PHONY: demo
demo: $(INSTALLED) ## three algorithms on four MPI engines from a notebook; prints a table, writes an HTML page
	$(BIN)/workbench demo

.PHONY: test
test: $(INSTALLED) $(MPICH) ## every test that this machine can run (a selection: TESTS='tests/unit -k ring'; fewer processes: WORKERS=2; the order of an earlier run: SEED=123)
	$(BIN)/python -m compileall -q workbench tests  # for hundreds of processes, even if PYTHONDONTWRITEBYTECODE is set
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(WORKERS) $(if $(SEED),--randomly-seed $(SEED)) $(or $(TESTS),--durations 20)

$(NEWEST)/.installed: pyproject.toml constraints.txt constraints-newest.txt
	@$(PYTHON_NEWEST) -c 'import venv, ensurepip' || { echo 'Install Python 3.13, or name another one: make test-newest PYTHON_NEWEST=python3.11' >&2; exit 1; }
	test -x $(NEWEST)/bin/python || $(PYTHON_NEWEST) -m venv $(NEWEST)
	@echo 'Installing the newest torch into $(NEWEST): several GB, and some minutes.'
	awk -F == 'NR == FNR { newest[$$1] = $$0; next } { print $$1 in newest ? newest[$$1] : $$0 }' constraints-newest.txt constraints.txt > $(NEWEST)/constraints.txt
	PIP_CONSTRAINT=$(NEWEST)/constraints.txt $(NEWEST)/bin/python -m pip install -qq --disable-pip-version-check --editable '.[all]'
	touch $@

.PHONY: test-newest
test-newest: $(NEWEST)/.installed ## tests that a new torch or Python may break, in a separate environment; downloads several GB (another Python: PYTHON_NEWEST=python3.11)
	$(NEWEST)/bin/python -m compileall -q workbench tests
	$(NEWEST)/bin/python -m pytest --numprocesses $(WORKERS) $(if $(SEED),--randomly-seed $(SEED)) tests/unit -k 'not hostile'
	$(NEWEST)/bin/python -m pytest --numprocesses $(WORKERS) $(if $(SEED),--randomly-seed $(SEED)) tests/laws -k 'test_decentralised or test_updates or test_staleness or test_collectives'
	$(NEWEST)/bin/python -m pytest $(if $(SEED),--randomly-seed $(SEED)) tests/distributed/test_background.py

.PHONY: lab
lab: $(INSTALLED) ## open JupyterLab with the Workbench kernel
	WORKBENCH_RUNS=$(CURDIR)/runs $(BIN)/jupyter lab --MultiKernelManager.default_kernel_name=workbench \
	  $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/00-tour.ipynb

.PHONY: lab-extension
lab-extension: $(INSTALLED) ## build the panel of JupyterLab from lab/ into workbench/lab/static (needs Node.js), and install it
	$(BIN)/python lab/build.py
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --constraint constraints.txt --editable .

# Types are checked while the tests run. tests/quick.txt lists tests that need one process, and a law of each family.
.PHONY: check
check: $(INSTALLED) ## before a commit: style, layers, types and the quick tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	@echo '$(BIN)/mypy & $(BIN)/python -m pytest -q --numprocesses $(QUICK_WORKERS) @tests/quick.txt'
	@$(BIN)/mypy & types=$$!; failed=0; $(BIN)/python -m pytest -q --numprocesses $(QUICK_WORKERS) @tests/quick.txt || failed=$$?; \
	  wait $$types || failed=$$?; exit $$failed

.PHONY: lint
lint: $(INSTALLED) ## style, format, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: docs
docs: $(INSTALLED) ## the documentation as a site, read without a network; on one page: make docs FORMAT=singlehtml
	$(BIN)/python docs/build.py $(or $(FORMAT),html)

.PHONY: papers
papers: $(INSTALLED) ## every notebook that tests a paper's claims, at its smallest size
	$(BIN)/python -m pytest -m papers tests/notebooks/test_smoke.py

.PHONY: gpu
gpu: $(INSTALLED) ## the tests that need a GPU; all other tests hide it
	$(BIN)/python -m pytest -m gpu --numprocesses 0 tests

.PHONY: bench
bench: $(INSTALLED) ## every benchmark of `workbench bench`, compared with records/; writes runs/bench
	$(BIN)/workbench bench all --output runs/bench --against records

.PHONY: bench-simulator
bench-simulator: $(INSTALLED) ## the simulator next to SimPy and to a plain PyTorch loop; writes records/simulator.json (five minutes)
	$(BIN)/python -m tests.benchmarks.simulator --write

.PHONY: study
study: $(INSTALLED) ## every algorithm on the digits: margins in loss over ten seeds, then the table over runtimes (half an hour)
	$(BIN)/python -m tests.benchmarks.digits_algorithms margins
	$(BIN)/python -m tests.benchmarks.digits_algorithms table

.PHONY: combinations
combinations: $(INSTALLED) ## every algorithm that sums with every codec, on a convex problem: trained, or refused (five minutes)
	$(BIN)/python -m tests.benchmarks.combinations

.PHONY: predictions
predictions: $(INSTALLED) ## predicted and measured step times on an emulated network (root; 20 minutes of a quiet machine)
	$(BIN)/python -m tests.benchmarks.predictions run

.PHONY: study-check
study-check: $(INSTALLED) ## what wb.study predicts for two models, against real ranks on an emulated network (root; 12 minutes of a quiet machine)
	$(BIN)/python -m tests.benchmarks.study_check

.PHONY: backups
backups: $(INSTALLED) ## the best number of backup workers of 100 machines, from arrival times measured here (ten minutes)
	$(BIN)/python -m tests.benchmarks.best_backups

.PHONY: slept
slept: $(INSTALLED) ## eight real ranks that sleep for their compute, next to the simulator; writes records/slept.json (five minutes of a quiet machine)
	$(BIN)/python -m tests.benchmarks.slept --write

.PHONY: topologies
topologies: $(INSTALLED) ## topologies of D-PSGD on 16 and 64 simulated workers: distance by step, time of a step; writes records/topologies.json and .svg
	$(BIN)/python -m tests.benchmarks.topologies

.PHONY: tuned-rates
tuned-rates: $(INSTALLED) ## the best learning rate for each problem, algorithm and delay; only rows that the record lacks (some 25 minutes of one core for all)
	$(BIN)/python -m tests.benchmarks.tune_rates

.PHONY: clean
clean: ## remove the environment, caches and build outputs; runs/ stays
	rm -rf $(VENV) $(NEWEST) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

.PHONY: faults
faults: $(INSTALLED) ## each fault with each algorithm: the outcome, and the seconds to detect and to recover (real kills; ten minutes)
	mkdir -p runs
	$(BIN)/python -m tests.benchmarks.faults --json runs/faults.json

.PHONY: soak
soak: $(INSTALLED) ## an hour of trainings with a fault a minute, a thousand interrupts, a hundred starts and ends (shorter trainings: MINUTES=5)
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.benchmarks.soak --minutes $(or $(MINUTES),60)
	WORKBENCH_INTERRUPTS=1000 $(BIN)/python -m pytest -q -s tests/distributed/test_interrupted.py
	WORKBENCH_CYCLES=100 $(BIN)/python -m pytest -q tests/distributed/test_leaks.py

.PHONY: fuzz
fuzz: $(INSTALLED) ## thousands of bad inputs for all code that reads files and commands; writes their number to runs/fuzz.json
	mkdir -p runs
	WORKBENCH_FUZZ=5000 WORKBENCH_FUZZ_COUNT=$(CURDIR)/runs/fuzz.json $(BIN)/python -m pytest --timeout 3600 tests/unit -k hostile

.PHONY: new-algorithm
new-algorithm: $(INSTALLED) ## the tests that a new algorithm must satisfy: make new-algorithm NAME=HalvesSGD
	@test -n "$(NAME)" || { echo "Say which: make new-algorithm NAME=HalvesSGD (the name of its class)" >&2; exit 1; }
	$(BIN)/python -m pytest -q tests/unit/test_{catalogue,papers,front_page,layers,style,security,deadlines}.py
	$(BIN)/python -m pytest -q tests/laws -k "$(NAME) or local_steps or every_algorithm"

.PHONY: mutants
mutants: $(INSTALLED) ## plants bugs in a copy of the package and names the test that finds each; writes records/mutants.json (half an hour; a selection: MUTANTS=ring)
	$(BIN)/python -m tests.mutants.run --write $(MUTANTS)

.PHONY: audit
audit: $(INSTALLED) ## known vulnerabilities of the pinned dependencies (needs the network)
	test -x $(VENV)/opt/audit/bin/pip-audit || { $(BIN)/python -m venv $(VENV)/opt/audit && $(VENV)/opt/audit/bin/pip install -qq pip-audit; }
	$(VENV)/opt/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip
