# Everything sets itself up on a fresh machine that has make and Python 3.10 or newer: `make run`, `make test`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCHX_NIGHTLY ?= torchx-nightly==2026.10.26
SOAK_COUNT ?= 10
SIM_SEEDS ?= 100000

STABLE := .venv/bin
NIGHTLY := .venv-nightly/bin
PYTEST := $(STABLE)/python -m pytest
# what runs against both TorchX lines; the other files may import torch, which .venv-nightly has not
BOTH_LINES = $(shell grep -rlE 'mark\.torchx' tests --include='test_*.py')
# on the nightly line in `make soak` only, since others' tests of it run on both lines: what is asked of containers, their
# agents and limits, killed submissions
CONTROL := tests/docker/test_docker_control.py tests/docker/test_docker_contract.py tests/docker/test_docker_agents.py \
	tests/docker/test_docker_container_restart.py tests/docker/test_docker_killed_submission.py \
	tests/docker/test_docker_host_network.py tests/docker/test_docker_afterwards.py tests/docker/test_docker_limits.py \
	tests/docker/test_docker_golden.py tests/docker/test_docker_hold.py
# on the nightly line in `make nightly` only, since it hardly meets TorchX: what is asked of running jobs, pods, queues,
# the bundle, golden states, folders, logs and reports on this machine
ASIDE := tests/process/control/test_local_control.py tests/process/control/test_resize.py \
	tests/process/kubernetes/test_control.py tests/process/kubernetes/test_pod.py \
	tests/process/kubernetes/test_submission.py \
	tests/process/kubernetes/test_queue.py tests/process/kubernetes/test_follow.py \
	tests/process/kubernetes/test_restarted_server.py tests/process/kubernetes/test_what_is_told.py \
	$(wildcard tests/process/*/test_golden.py) tests/process/local/test_ends.py tests/process/local/test_folders.py \
	tests/process/local/test_logs.py tests/process/local/test_prune.py tests/process/local/test_reports.py \
	tests/process/local/test_two_users.py tests/process/local/test_working_dir.py \
	tests/unit/schedulers/test_bundle.py tests/unit/cli/test_afterwards.py
# minutes for each script: in `make nightly` only
REHEARSED := tests/process/examples/test_rehearsed_examples.py
# collecting all files so many times takes minutes
SOAK = $(shell grep -rlE 'mark\.soak' tests --include='test_*.py')

.PHONY: help run check test test-processes test-nightly test-docker test-docker-nightly test-docker-alone test-slurm \
	soak soak-long soak-docker soak-slurm soak-loops gpu nightly bench docs package environments

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-14s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STABLE)/.runs ## train on handwritten digits, 2 nodes x 4 workers on this machine
	$(STABLE)/torchx run -s local_cwd dist.ddp -j 2x4 --script examples/digits/train.py

check: $(STABLE)/.ready ## lint, spelling, types, unit tests
	$(STABLE)/ruff check .
	$(STABLE)/ruff format --check .
	$(STABLE)/codespell
	$(STABLE)/mypy
	$(PYTEST) -q --numprocesses 2 -m 'not long' tests/unit

# Most tests wait most of the time, so two parts run at a time; a third makes the machine so busy that time limits are missed.
# A part that fails does not keep the others from running: one run names all failures.
test: check $(NIGHTLY)/.ready ## all tests but those marked long, on both TorchX lines
	$(MAKE) --no-print-directory --keep-going --jobs 2 test-processes test-docker test-docker-nightly test-nightly \
		test-slurm test-docker-alone

test-processes: $(STABLE)/.ready
	$(PYTEST) -q --numprocesses 5 -m 'not long' tests/process tests/fault tests/conformance tests/ssh

test-nightly: $(NIGHTLY)/.ready
	$(call print_at_its_end,$(NIGHTLY)/python -m pytest -q --numprocesses 4 --dist loadfile -m 'torchx and not long' $(filter-out $(CONTROL) $(ASIDE),$(BOTH_LINES)))

test-docker: $(STABLE)/.ready
	$(call print_at_its_end,$(PYTEST) -q --numprocesses 2 --dist loadfile -m 'not alone and not long' tests/docker tests/kubernetes)

test-docker-nightly: $(NIGHTLY)/.ready
	$(call print_at_its_end,$(NIGHTLY)/python -m pytest -q --numprocesses 2 --dist loadfile -m 'not alone and not long' tests/docker $(CONTROL:%=--ignore=%))

test-docker-alone: $(STABLE)/.ready test-docker test-docker-nightly # with nothing else on the engine
	$(call print_at_its_end,$(PYTEST) -q -m 'alone and not long' tests/docker)

test-slurm: $(STABLE)/.ready
	$(call print_at_its_end,$(PYTEST) -q --numprocesses 3 -m 'not long' tests/slurm)

# beside a part that prints as it goes
define print_at_its_end
	said=$$($(1) 2>&1) && code=0 || code=$$?; printf '%s\n' "$$said"; exit $$code
endef

soak: $(STABLE)/.ready $(NIGHTLY)/.ready ## the tests marked long; 10 times, with all cores busy, those marked soak (twice with torch or namespaces)
	$(MAKE) --no-print-directory --keep-going --jobs 3 soak-long soak-docker soak-slurm
	$(MAKE) --no-print-directory soak-loops

soak-long: $(STABLE)/.ready $(NIGHTLY)/.ready
	$(PYTEST) -q --numprocesses 4 --dist worksteal -m 'long and not soak' --ignore $(REHEARSED) tests/unit tests/process tests/fault tests/conformance tests/ssh

soak-docker: $(STABLE)/.ready $(NIGHTLY)/.ready
	$(call print_at_its_end,$(PYTEST) -q --numprocesses 2 --dist loadfile -m 'long and not alone' tests/docker)
	$(call print_at_its_end,$(PYTEST) -q -m 'long and alone' tests/docker)
	$(call print_at_its_end,$(NIGHTLY)/python -m pytest -q -m 'alone and not long' tests/docker)
	$(call print_at_its_end,$(NIGHTLY)/python -m pytest -q --numprocesses 3 --dist loadfile -m 'docker and not alone' $(CONTROL))

soak-slurm: $(STABLE)/.ready $(NIGHTLY)/.ready
	$(call print_at_its_end,$(PYTEST) -q --numprocesses 3 -m long tests/slurm)
	$(call print_at_its_end,$(NIGHTLY)/python -m pytest -q --numprocesses 2 tests/slurm/test_slurm_contract.py)
	$(call print_at_its_end,$(NIGHTLY)/python -m pytest -q --numprocesses 2 tests/ssh/test_ssh_contract.py)

soak-loops: $(STABLE)/.ready
	busy=(); trap 'kill "$${busy[@]}"' EXIT; \
	for ((core = 0; core < $$(nproc); core++)); do (while :; do :; done) & busy+=($$!); done; \
	$(PYTEST) -q -m 'soak and not netns and not slow' --count $(SOAK_COUNT) --numprocesses 6 --timeout 300 $(SOAK); \
	$(PYTEST) -q -m 'soak and slow' --count 2 --numprocesses 4 --dist worksteal --timeout 600 $(SOAK); \
	$(PYTEST) -q -m 'soak and netns' --count 2 --numprocesses 4 --dist worksteal --timeout 300 $(SOAK); \
	MUSTER_DRAIN_RUNS=10 $(PYTEST) -q --numprocesses 3 --timeout 600 tests/fault/test_drain_netns.py

gpu: $(STABLE)/.ready ## the tests that need an NVIDIA GPU, and what muster sees of this machine
	-$(STABLE)/muster doctor
	MUSTER_REQUIRE=gpu $(PYTEST) -m gpu -rs tests/process

nightly: $(STABLE)/.ready $(NIGHTLY)/.ready ## the simulations with more seeds; 1,000 jobs from one program; forked jobs; eight rehearsed scripts; what hardly meets TorchX on its nightly line
	MUSTER_SIM_SEEDS=$(SIM_SEEDS) $(PYTEST) -q --numprocesses auto tests/unit/rendezvous/test_simulation.py \
		tests/unit/rendezvous/test_member_decisions.py
	MUSTER_ELASTIC_DRAIN_SEEDS=20000 $(PYTEST) -q --numprocesses auto tests/unit/rendezvous/test_elastic_drain_simulation.py
	MUSTER_DRAIN_RUNS=50 $(PYTEST) -q --numprocesses 2 --timeout 600 tests/fault/test_drain_netns.py
	MUSTER_SNAPSHOT_RUNS=0:200 $(PYTEST) -q --numprocesses 4 tests/fault/test_snapshot_runs.py
	$(NIGHTLY)/python -m pytest -q --numprocesses 4 --dist loadfile -m torchx $(ASIDE)
	MUSTER_LAUNCHES=1000 $(PYTEST) -q -k loop_leave_nothing tests/process/elastic/test_launch.py
	$(PYTEST) -q --count 3 --numprocesses 2 -k 'example or told_what' $(REHEARSED) tests/process/local/test_rehearse.py
	MUSTER_HOLD_RUNS=200 $(PYTEST) -q --timeout 7200 -k many_runs tests/process/held/test_holds.py
	MUSTER_FORK_LOOPS=20 $(PYTEST) -q tests/process/elastic/test_fork_matrix.py

bench: $(STABLE)/.ready ## measure against torchrun, side by side
	for benchmark in benchmarks/[a-z]*.py; do $(STABLE)/python "$$benchmark"; done
	MUSTER_MEASURE_TORCHRUN=1 $(PYTEST) -q -m fault -k torchrun -rxX tests/conformance

docs: $(STABLE)/.ready ## build the documentation into build/docs; a warning is an error
	rm -rf build/docs
	$(STABLE)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

package: $(STABLE)/.ready ## build wheel and sdist into dist/, check them, install them on every Python there is
	rm -rf dist
	$(STABLE)/python -m build --outdir dist .
	$(STABLE)/python -m twine check --strict dist/*
	$(STABLE)/python tests/check_package.py dist

environments: $(STABLE)/.ready $(NIGHTLY)/.ready ## only install: .venv (torchx 0.7.0, torch), .venv-nightly (torchx-nightly)

# enough for `make run`; torch goes first and alone: together with the rest pip would look at every version of it
$(STABLE)/.runs: pyproject.toml setup.py Makefile
	$(call make_environment,.venv)
	$(call install,$(STABLE),torch: a download of 200 MB$(COMMA) with the libraries of CUDA 3 GB,"$(TORCH)")
	$(call install,$(STABLE),TorchX and muster: a minute,torchx==0.7.0 -e '.[all]')
	@touch $@

$(STABLE)/.ready: $(STABLE)/.runs
	$(call install,$(STABLE),what the tests and the documentation need: 200 MB in two minutes,$(FOR_TESTS))
	@touch $@

# without muster's dependencies: they name torchx, and the nightly line is another distribution of the same package
$(NIGHTLY)/.ready: pyproject.toml setup.py Makefile
	$(call make_environment,.venv-nightly)
	$(call install,$(NIGHTLY),the nightly line of TorchX: a minute,"$(TORCHX_NIGHTLY)" docker kubernetes pytest pytest-timeout \
		pytest-xdist hypothesis kubernetes-validate kubeflow-trainer-api jsonschema)
	$(call install,$(NIGHTLY),muster beside it,-e . --no-deps)
	@touch $@

# pip's own progress, with names and sizes, where somebody sees it
define install
	@echo "$(patsubst %/bin,%,$(1)): installing $(2)"
	@$(1)/python -m pip install $(if $(MAKE_TERMOUT),,-q) $(3)
endef
COMMA := ,
FOR_TESTS := torchx==0.7.0 -e '.[test,clients,docker,kubernetes,docs,package]'

define make_environment
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else f"muster needs Python 3.10 or newer, \
	and $(PYTHON) is {sys.version.split()[0]}; name another: make PYTHON=python3.12")'
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1) || { rm -rf $(1); \
	echo "no virtual environment could be made; on Debian: apt-get install python3-venv" >&2; exit 1; }
endef
