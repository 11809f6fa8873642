# `make` lists the targets. PYTHON is the Python that .venv is created with; pyproject.toml says which versions work.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# "3.14 3.13 3.12 3.11 3.10", if requires-python is ">=3.10,<3.15"
VERSIONS := $(shell sed -n 's/^requires-python = ">=3\.\([0-9]*\),<3\.\([0-9]*\)".*/seq -f 3.%g $$((\2 - 1)) -1 \1/p' pyproject.toml | sh)
CANDIDATES := $(or $(PYTHON),python3 $(VERSIONS:%=python%))
PIP = $(BIN)/python -m pip --disable-pip-version-check
# -qq hides pip's warnings about the machine's set-up; it still prints errors. Python compiles a
# module when it is first imported: pip would take half its time to compile everything, on one core
PIP_INSTALL = $(PIP) install -qq --no-compile
# the stamp exists only if everything in requirements.txt is installed
STAMP := $(VENV)/installed
# torch-xla works with one older release of torch, so it has an environment of its own
XLA := .cache/xla
# vLLM needs an older transformers, so it has an environment of its own
VLLM := .cache/vllm
# the release for CPUs where there is no GPU
VLLM_REQUIREMENTS := install/vllm-$(if $(shell command -v nvidia-smi),cuda,cpu)-requirements.txt

.PHONY: help install install-xla install-vllm demo test test-numerics test-cuda test-cuda-rehearsal test-matrix test-launchers test-xla test-vllm test-downstream check lint benchmark docs docs-serve clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name what; do \
	  printf '  make %-20s %s\n' "$$name" "$$what"; done

install: $(STAMP) ## set up .venv with the pinned requirements

install-xla: $(XLA)/installed ## set up .cache/xla for --accelerator tpu: torch-xla with its own torch (8 GB)

install-vllm: $(VLLM)/installed ## set up .cache/vllm for --sampler vllm: vLLM with its own torch and transformers (2 GB; 10 GB with CUDA)

demo: $(STAMP) ## tokenize, train, export and generate on real data (6 minutes on 2 cores)
	@$(BIN)/python -m demo

test: $(STAMP) ## run the tests that CI runs (9 to 15 minutes on 2 cores)
	@$(BIN)/python -m pytest

# the libraries' oldest code paths add the terms of a sum in another order than those for this processor
test-numerics: export MKL_CBWR = COMPATIBLE
test-numerics: export ATEN_CPU_CAPABILITY = default
test-numerics: export ONEDNN_MAX_CPU_ISA = SSE41
test-numerics: $(STAMP) ## run the tests that compare numbers, with another rounding (1 minute)
	@$(BIN)/python -m pytest -m 'numerical and not matrix and not launchers and not cuda_rehearsal' $$(grep -rl --include='test_*.py' '^@pytest.mark.numerical' tests)

test-cuda: $(STAMP) ## run the tests that need a GPU
	@$(BIN)/python -m pytest -n 0 -m cuda

test-matrix: $(STAMP) ## run further points of the tests' matrices, which tests/matrix.txt names
	@$(BIN)/python -m pytest -m matrix

test-launchers: $(STAMP) ## run the slow tests of real launchers: fabric run, torchrun, python -m, mpiexec, PBS, Slurm, containers
	@$(BIN)/python -m pytest -n 0 -m launchers

test-xla: $(STAMP) $(XLA)/installed ## train on XLA's CPU device and compare with the CPU (4 minutes)
	@$(BIN)/python -m pytest -n 0 -m xla

test-vllm: $(STAMP) ## sample with a real vLLM server, of VLLM_PYTHON or .cache/vllm (5 minutes)
	@$(if $(VLLM_PYTHON),,$(MAKE) --no-print-directory install-vllm)
	@$(BIN)/python -m pytest -n 0 -m vllm tests/rollouts

test-downstream: $(STAMP) ## use exports in other software: transformers 4, lm_eval, llama.cpp, vLLM, peft, and compare merges with mergekit (writes docs/downstream.md)
	@DOWNSTREAM_TABLE=docs/downstream.md $(BIN)/python -m pytest -n 0 -m downstream

test-cuda-rehearsal: $(STAMP) ## train in every mode on pretended CUDA devices (writes tests/cuda_rehearsal/README.md), compare plan and counts
	@CUDA_REHEARSAL_TABLE=tests/cuda_rehearsal/README.md $(BIN)/python -m pytest -n 0 -m cuda_rehearsal --ignore tests/cuda_rehearsal/test_first_hour.py tests/cuda_rehearsal tests/preflight/test_recipes.py tests/preflight/test_memory.py tests/model/test_adapter.py

check: $(STAMP) ## run one test file in one process: make check FILE=tests/data/test_batch.py
	@$(BIN)/python -m pytest -n 0 -q $(or $(FILE),$(error no test file; name one: make check FILE=tests/data/test_batch.py))

lint: $(STAMP) ## run ruff (rules and format) and mypy
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

benchmark: $(STAMP) ## run the benchmarks (see benchmarks/README.md)
	@$(BIN)/python -m benchmarks

docs: $(VENV)/docs-installed ## build the site of the documentation, build/docs/site; wrong links and stale pages fail
	@$(BIN)/python -m docs_build site

docs-serve: $(VENV)/docs-installed ## show the site on http://localhost:8000 and follow changes of the documents
	@$(BIN)/python -m docs_build serve

clean: ## remove .venv, downloads, caches and the demo's output
	@rm -rf $(VENV) .cache demo_run .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

# the pip that comes with Python may be old: pip 23 takes three times as long to choose the releases
$(VENV)/python $(XLA)/python $(VLLM)/python: install/create_venv.py
	@for python in $(CANDIDATES); do \
	  if "$$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(VERSIONS)".split())' 2>/dev/null; then \
	    echo "[1/4] $(@D) with $$("$$python" --version)"; \
	    "$$python" install/create_venv.py $(@D); \
	    $(@D)/bin/python -m pip --disable-pip-version-check install -qq --no-compile "$$(grep '^pip==' requirements.txt)"; \
	    touch $@; exit 0; \
	  fi; \
	done; \
	echo 'error: no Python $(lastword $(VERSIONS)) to $(firstword $(VERSIONS)) among: $(CANDIDATES); name one: make install PYTHON=...' >&2; exit 1

$(STAMP): $(VENV)/python requirements.txt pyproject.toml
	@rm -f $@
	@torch=$$(grep '^torch==' requirements.txt); \
	  echo "[2/4] requirements.txt, and $$torch at the same time (minutes on a slow connection)"; \
	  $(PIP_INSTALL) --no-deps "$$torch" & torch_install=$$!; \
	  $(PIP_INSTALL) --no-deps -r <(grep -v '^torch==' requirements.txt) || { kill $$torch_install 2> /dev/null; exit 1; }; \
	  wait $$torch_install
	@echo '[3/4] what these need (for GPUs, the largest download)'; $(PIP_INSTALL) -r requirements.txt
	@echo '[4/4] fabric_train itself'; $(PIP_INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/docs-installed: $(STAMP)
	@$(PIP_INSTALL) "$$(sed -n 's/^docs = .*\(zensical==[0-9.]*\).*/\1/p' pyproject.toml)"
	@touch $@

$(XLA)/installed: BIN := $(XLA)/bin
$(XLA)/installed: $(XLA)/python install/xla-requirements.txt requirements.txt pyproject.toml
	@rm -f $@
	@echo '[2/4] torch-xla and its torch (the largest download: minutes)'; $(PIP_INSTALL) -r install/xla-requirements.txt
	@echo '[3/4] requirements.txt without its torch'; $(PIP_INSTALL) -r <(grep -v '^torch==' requirements.txt)
	@echo '[4/4] fabric_train itself'; $(PIP_INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

$(VLLM)/installed: BIN := $(VLLM)/bin
$(VLLM)/installed: $(VLLM)/python $(VLLM_REQUIREMENTS)
	@rm -f $@
	@echo '[2/4] vLLM, its torch and its transformers (the largest download: minutes)'; $(PIP_INSTALL) -r $(VLLM_REQUIREMENTS)
	@echo '[3/4] without packages of the index that are built for CUDA, where there is no GPU'
	@$(if $(findstring cpu,$(VLLM_REQUIREMENTS)),$(PIP) uninstall -qq -y torchvision torchaudio torchcodec)
	@echo '[4/4] check'; $(BIN)/python -c 'import vllm' 2>/dev/null || { echo 'error: vLLM cannot be imported; see $(BIN)/python -c "import vllm"' >&2; exit 1; }
	@touch $@
