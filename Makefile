# `make demo` and `make test` work from a fresh clone: they set up .venv first, and later calls install nothing.

PROFILE ?= auto
SCHEME ?= int8
WORKERS ?= 3
CPU ?=
PYTEST_ARGS ?=
ROWS ?=
MODEL ?=
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1 && { echo $$p; break; }; done)

BIN := .venv/bin
UV ?= $(BIN)/uv
# Where `make lock` and `make test-versions` find a CPU build of torch; with a local wheel: TORCH_CPU="--find-links DIR"
TORCH_CPU ?= --torch-backend cpu
PYTEST = $(if $(filter laptop,$(CPU)),PYTHONPATH=tests/laptop) $(BIN)/pytest -n $(WORKERS) --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-ppo demo-rloo docs docs-serve test baselines test-fast test-all test-deepspeed test-random test-versions simulated lint format size lock check-extras clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PROFILE=auto|cpu|gpu   which lock file to install (auto: gpu where nvidia-smi lists a device)"
	@echo "  SCHEME=int8|fp8|none   the demo's rollouts; WORKERS=N, PYTEST_ARGS='...' for the tests"
	@echo "  CPU=laptop             the tests without AVX-512 and AMX, if this CPU has them"

setup: ## create or update .venv from the lock file of this machine's profile
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 on PATH. Install one, or pass its path: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) tools/setup_env.py --profile $(PROFILE)

demo: setup ## train a tiny model on addition with quantized rollouts, beside a stored run in 16 bits
	$(BIN)/trl-qurl demo --scheme $(SCHEME)

demo-ppo: setup ## the same with a critic, then again with BF16 rollouts for comparison
	$(BIN)/trl-qurl demo --algorithm ppo --scheme $(SCHEME) --output-dir demo-output-ppo
	$(BIN)/trl-qurl demo --algorithm ppo --scheme none --output-dir demo-output-ppo/bf16
	$(BIN)/trl-qurl report demo-output-ppo demo-output-ppo/bf16 -o demo-output-ppo/report.png

demo-rloo: setup ## the same as demo with RLOO's loss
	$(BIN)/trl-qurl demo --algorithm rloo --scheme $(SCHEME) --output-dir demo-output-rloo

docs: setup ## build the documentation into site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict
	@echo "Documentation: site/index.html (its search works when it is served: make docs-serve)"

docs-serve: setup ## serve the documentation at http://127.0.0.1:8008 while you write
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs serve --strict --dev-addr 127.0.0.1:8008

test: setup ## run the tests, except those marked slow
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-fast: setup ## run the tests that need neither an engine nor a GPU
	$(PYTEST) -m "not vllm and not gpu and not simulated_gpu and not slow" $(PYTEST_ARGS)

test-all: setup ## run every test, including the slow ones
	$(PYTEST) $(PYTEST_ARGS)

test-deepspeed: setup ## run the tests of ZeRO; installs DeepSpeed, which the lock file for CPUs lacks
	$(BIN)/pip install --quiet deepspeed==0.19.8
	$(PYTEST) tests/test_processes.py -k zero3 $(PYTEST_ARGS)

test-random: setup ## the same as test, in an order that is drawn anew
	$(BIN)/pip install --quiet --upgrade --no-deps --target .venv/random pytest-randomly==4.0.1
	PYTHONPATH=.venv/random $(PYTEST) -m "not slow" $(PYTEST_ARGS)

baselines: setup ## measure what must not get worse, and compare it with the stored figures; MODEL=DIRECTORY adds a real model
	$(BIN)/python benchmarks/baselines.py $(if $(MODEL),--model $(MODEL))

test-versions: setup ## test with other releases of TRL, vLLM and transformers; ROWS="newest" selects some
	$(PYTHON) tools/versions.py --uv $(UV) --torch="$(TORCH_CPU)" --workers $(WORKERS) --rows $(ROWS)

simulated: setup ## start and reload every format on GPUs that are not there, and write the table in docs/choosing.md
	PYTHONPATH=.:tests $(BIN)/python -m simulated_gpu

lint: setup ## run ruff, mypy, the import contracts, shellcheck and the limits on size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck examples/*.sh .ci/run
	$(BIN)/python tools/size.py

format: setup ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

size: setup ## count long files and functions, and settings, and compare them with their limits
	@$(BIN)/python tools/size.py

# The CPU lock leaves out three packages that vLLM lists but does not need, and whose CUDA builds break a CPU torch.
LOCK = $(UV) pip compile --quiet --python-version 3.11 --override requirements/override.txt \
	--custom-compile-command "make lock"
lock: setup ## rewrite requirements/*.lock from requirements/*.in
	$(LOCK) $(TORCH_CPU) requirements/cpu.in --output-file requirements/cpu.lock \
		--no-emit-package torchaudio --no-emit-package torchcodec --no-emit-package torchvision
	sed -i 's/^\(torch==[0-9.]*\)+cpu$$/\1/' requirements/cpu.lock
	$(LOCK) --python-platform x86_64-manylinux_2_35 requirements/gpu.in --output-file requirements/gpu.lock

check-extras: setup ## check that pip and uv resolve the package and its extras to tested versions (needs the network)
	UV=$(UV) $(BIN)/python tools/check_extras.py

clean: ## remove .venv, builds and caches
	rm -rf .venv .versions build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
