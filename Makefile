# Needs Python 3.11 or later, pip and make. Every target builds .venv first if it is missing or stale.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# One thread per test process, because the processes share the cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Threads that wait leave their core to others; spinning costs several times the run on a busy machine.
DEMO_ENV := OMP_WAIT_POLICY=PASSIVE
# TensorFlow logs a notice about its kernels in every process.
KERAS_ENV := KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3
WORKERS ?= 2

# Silences a notice about the site generator's future, which is not about this documentation.
export NO_MKDOCS_2_WARNING := 1

.PHONY: install browser demo test check format docs bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,keras,report,dev]'
	touch $@

# Where it cannot be installed, the tests of the report's page are skipped with that reason.
browser:
	command -v chromedriver >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium chromium-driver; }

demo: $(INSTALLED)
	$(DEMO_ENV) $(BIN)/halfstep compare examples/digits.py --seeds 3
	$(DEMO_ENV) $(BIN)/halfstep compare examples/bytelm.py --seeds 3
	$(DEMO_ENV) $(KERAS_ENV) $(BIN)/halfstep compare examples/keras_digits.py --seeds 3

test: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict --quiet

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

bench: $(INSTALLED)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/saved.py
	$(BIN)/python benchmarks/jax_saved.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/region.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/jax_step.py
	$(BIN)/python benchmarks/keras_fit.py
	$(BIN)/python benchmarks/doctor.py
	$(BIN)/python benchmarks/plan.py

clean:
	rm -rf $(VENV) site build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
