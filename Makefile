# Everything sets itself up on a fresh machine that has make and Python 3.10 or newer: `make run`, `make test`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# or each process of a test compiles what it imports anew
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCHX := torchx==0.7.0
TORCHX_NIGHTLY ?= torchx-nightly==2026.10.26
SOAK_COUNT ?= 10
SLOW_COUNT ?= 2
SIM_SEEDS ?= 100000

STABLE := .venv/bin
NIGHTLY := .venv-nightly/bin
# the nightly line with torch and all else, for `make nightly`
WHOLE := .venv-nightly-whole/bin
# each run of pytest writes how long its tests took; tests/durations.py reads it
JUNIT := build/junit
pytest = $(1)/python -m pytest -q --junitxml=$(JUNIT)/$(2).xml
PYTEST := $(STABLE)/python -m pytest
# what runs against both TorchX lines; the other files may import torch, which .venv-nightly has not
BOTH_LINES = $(shell grep -rlE 'mark\.torchx' tests --include='test_*.py')
# minutes for each script: in `make nightly` only
REHEARSED := tests/process/examples/test_rehearsed_examples.py
# collecting all files so many times takes minutes
SOAK = $(shell grep -rlE 'mark\.soak' tests --include='test_*.py')

.PHONY: help run check lint test test-unit test-processes test-nightly test-docker test-docker-alone test-slurm \
	soak soak-long soak-docker soak-slurm soak-loops gpu nightly bench docs package environments

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-14s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STABLE)/.runs ## train on handwritten digits, 2 nodes x 4 workers on this machine
	$(STABLE)/torchx run -s local_cwd dist.ddp -j 2x4 --script examples/digits/train.py

check: $(STABLE)/.ready ## lint, spelling, types, unit tests
	$(MAKE) --no-print-directory --keep-going --jobs 2 test-unit lint

lint: $(STABLE)/.ready
	$(STABLE)/ruff check .
	$(STABLE)/ruff format --check .
	$(STABLE)/codespell
	$(STABLE)/mypy

# Most tests wait most of the time, so parts run side by side. A part that fails does not keep the others from running:
# one run names all failures.
test: $(STABLE)/.ready $(NIGHTLY)/.ready ## all tests but those marked long; what meets TorchX on both of its lines; lint, types, the documentation
	rm -rf $(JUNIT)
	$(MAKE) --no-print-directory --keep-going --jobs 3 test-processes test-docker test-unit test-nightly test-slurm \
		lint docs test-docker-alone

test-unit: $(STABLE)/.ready
	$(call pytest,$(STABLE),unit) --numprocesses 3 -m 'not long' tests/unit

test-processes: $(STABLE)/.ready
	$(call pytest,$(STABLE),processes) --numprocesses 7 -m 'not long' tests/process tests/fault tests/conformance tests/ssh

test-nightly: $(NIGHTLY)/.ready
	$(call print_at_its_end,$(call pytest,$(NIGHTLY),nightly) --numprocesses 3 --dist loadfile -m 'torchx and not alone and not long' $(BOTH_LINES))

test-docker: $(STABLE)/.ready
	$(call print_at_its_end,$(call pytest,$(STABLE),docker) --numprocesses 2 --dist loadfile -m 'not alone and not long' tests/docker tests/kubernetes)

test-docker-alone: $(STABLE)/.ready test-docker test-nightly # with nothing else on the engine
	$(call print_at_its_end,$(call pytest,$(STABLE),alone) -m 'alone and not long' tests/docker)

test-slurm: $(STABLE)/.ready
	$(call print_at_its_end,$(call pytest,$(STABLE),slurm) --numprocesses 3 -m 'not long' tests/slurm)

# beside a part that prints as it goes
define print_at_its_end
	said=$$($(1) 2>&1) && code=0 || code=$$?; printf '%s\n' "$$said"; exit $$code
endef

soak: $(STABLE)/.ready $(NIGHTLY)/.ready ## the tests marked long; 10 times, with all cores busy, those marked soak (twice with torch or namespaces)
	$(MAKE) --no-print-directory --keep-going --jobs 3 soak-long soak-docker soak-slurm
	$(MAKE) --no-print-directory soak-loops

soak-long: $(STABLE)/.ready
	$(call pytest,$(STABLE),long) --numprocesses 4 --dist worksteal -m 'long and not soak' --ignore $(REHEARSED) tests/unit tests/process tests/fault tests/conformance tests/ssh

soak-docker: $(STABLE)/.ready
	$(call print_at_its_end,$(call pytest,$(STABLE),long-docker) --numprocesses 2 --dist loadfile -m 'long and not alone' tests/docker)
	$(call print_at_its_end,$(call pytest,$(STABLE),long-alone) -m 'long and alone' tests/docker)

soak-slurm: $(STABLE)/.ready
	$(call print_at_its_end,$(call pytest,$(STABLE),long-slurm) --numprocesses 3 -m long tests/slurm)

# CI runs each once: SOAK_COUNT=1 SLOW_COUNT=1
soak-loops: $(STABLE)/.ready
	busy=(); trap 'kill "$${busy[@]}"' EXIT; \
	for ((core = 0; core < $$(nproc); core++)); do (while :; do :; done) & busy+=($$!); done; \
	$(call pytest,$(STABLE),loops) -m 'soak and not netns and not slow' --count $(SOAK_COUNT) --numprocesses 6 --timeout 300 $(SOAK); \
	$(call pytest,$(STABLE),loops-slow) -m 'soak and slow' --count $(SLOW_COUNT) --numprocesses 4 --dist worksteal --timeout 600 $(SOAK); \
	$(call pytest,$(STABLE),loops-netns) -m 'soak and netns' --count $(SLOW_COUNT) --numprocesses 4 --dist worksteal --timeout 300 $(SOAK); \
	MUSTER_DRAIN_RUNS=$(SOAK_COUNT) $(call pytest,$(STABLE),loops-drains) --numprocesses 3 --timeout 600 -k "same_step or next_step" tests/fault/test_drain.py

gpu: $(STABLE)/.ready ## the tests that need an NVIDIA GPU, and what muster sees of this machine
	-$(STABLE)/muster doctor
	MUSTER_REQUIRE=gpu $(PYTEST) -m gpu -rs tests/process

nightly: $(STABLE)/.ready $(WHOLE)/.ready ## the simulations with more seeds; 1,000 jobs from one program; forked jobs; eight rehearsed scripts; all tests of the unit, process and docker folders on TorchX's nightly line
	MUSTER_SIM_SEEDS=$(SIM_SEEDS) $(PYTEST) -q --numprocesses auto tests/unit/rendezvous/test_simulation.py \
		tests/unit/rendezvous/test_member_decisions.py
	MUSTER_DRAIN_SEEDS=$(SIM_SEEDS) MUSTER_ELASTIC_DRAIN_SEEDS=20000 $(PYTEST) -q --numprocesses auto --timeout 0 \
		tests/unit/rendezvous/test_drain_simulation.py tests/unit/rendezvous/test_elastic_drain_simulation.py
	MUSTER_DRAIN_RUNS=50 $(PYTEST) -q --numprocesses 2 --timeout 600 -k "same_step or next_step" tests/fault/test_drain.py
	MUSTER_JOIN_RUNS=50 $(PYTEST) -q --numprocesses 2 tests/fault/test_joins.py
	MUSTER_SNAPSHOT_RUNS=0:200 $(PYTEST) -q --numprocesses 4 tests/fault/test_snapshot_runs.py
	MUSTER_IN_PLACE_RUNS=0:200 $(PYTEST) -q --numprocesses 3 tests/fault/test_in_place.py
	$(call pytest,$(WHOLE),whole-nightly) --hypothesis-profile random --numprocesses 4 --dist worksteal -m 'not long and not alone' tests/unit tests/process tests/docker tests/ssh tests/slurm
	MUSTER_LAUNCHES=1000 $(PYTEST) -q -k loop_leave_nothing tests/process/elastic/test_launch.py
	$(PYTEST) -q --count 3 --numprocesses 2 -k 'example or told_what' $(REHEARSED) tests/process/local/test_rehearse.py
	MUSTER_HOLD_RUNS=200 $(PYTEST) -q --timeout 7200 -k many_runs tests/process/held/test_holds.py
	MUSTER_FORK_LOOPS=20 $(PYTEST) -q tests/process/elastic/test_fork_matrix.py

bench: $(STABLE)/.ready ## measure all figures of the pages into build/figures.json
	mkdir -p build
	$(STABLE)/python benchmarks/figures.py run build/figures.json
	MUSTER_MEASURE_TORCHRUN=1 $(PYTEST) -q -m fault -k torchrun -rxX tests/conformance

docs: $(STABLE)/.ready ## build the documentation into build/docs; a warning is an error
	rm -rf build/docs
	$(STABLE)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs
	MUSTER_SITE=build/docs $(PYTEST) -q tests/process/docs/test_site.py
	@echo "build/docs/index.html"

package: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
package: $(STABLE)/.ready ## build wheel and sdist into dist/, check them, install the wheel in five ways, write its SBOM into build/
	rm -rf dist build/again
	$(STABLE)/python -m build --outdir dist .
	$(STABLE)/python -m build --outdir build/again .
	cmp dist/*.whl build/again/*.whl
	$(STABLE)/python -m twine check --strict dist/*
	$(STABLE)/python tests/check_package.py dist/*.whl build/sbom.cdx.json "$(TORCH)" "$(TORCHX)" "$(TORCHX_NIGHTLY)"

environments: $(STABLE)/.ready $(NIGHTLY)/.ready ## only install: .venv (torchx 0.7.0, torch), .venv-nightly (torchx-nightly)

# enough for `make run`; torch goes first and alone: together with the rest pip would look at every version of it
$(STABLE)/.runs: pyproject.toml setup.py Makefile
	$(call make_environment,.venv)
	$(call install,$(STABLE),torch: a download of 200 MB$(COMMA) with the libraries of CUDA 3 GB,"$(TORCH)")
	$(call install,$(STABLE),TorchX and muster: a minute,$(TORCHX) -e '.[all]')
	@touch $@

$(STABLE)/.ready: $(STABLE)/.runs
	$(call install,$(STABLE),what the tests and the documentation need: 200 MB in two minutes,$(FOR_TESTS))
	@touch $@

$(NIGHTLY)/.ready: pyproject.toml setup.py Makefile
	$(call make_environment,.venv-nightly)
	$(call install,$(NIGHTLY),the nightly line of TorchX and muster: a minute,"$(TORCHX_NIGHTLY)" -e '.[docker$(COMMA)kubernetes]' \
		pytest pytest-timeout pytest-xdist hypothesis kubernetes-validate kubeflow-trainer-api jsonschema)
	@touch $@

# all that the stable line has, but for TorchX
$(WHOLE)/.ready: pyproject.toml setup.py Makefile
	$(call make_environment,.venv-nightly-whole)
	$(call install,$(WHOLE),torch,"$(TORCH)")
	$(call install,$(WHOLE),the nightly line of TorchX and what the tests need,"$(TORCHX_NIGHTLY)" \
		-e '.[test$(COMMA)clients$(COMMA)docker$(COMMA)kubernetes]')
	@touch $@

# pip's own progress, with names and sizes, where somebody sees it
define install
	@echo "$(patsubst %/bin,%,$(1)): installing $(2)"
	@$(1)/python -m pip install $(if $(MAKE_TERMOUT),,-q) $(3)
endef
COMMA := ,
FOR_TESTS := $(TORCHX) -e '.[test,clients,docker,kubernetes,docs,package]'

define make_environment
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else f"muster needs Python 3.10 or newer, \
	and $(PYTHON) is {sys.version.split()[0]}; name another: make PYTHON=python3.12")'
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1) || { rm -rf $(1); \
	echo "no virtual environment could be made; on Debian: apt-get install python3-venv" >&2; exit 1; }
endef
