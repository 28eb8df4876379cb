# `make demo` and `make test` do all their set-up on a fresh machine, in .venv, and then their job.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all bench notebooks check clean

demo: .venv/demo.stamp  ## Figure 2 on embedded digits: 9 schedules x 5 seeds, about 2 minutes
	$(BIN)/regimes ablate smoke --seeds 5 --first-seed 1000 --jobs 2 --out runs/demo
	$(BIN)/python -m analysis.figure2 runs/demo --out figures/demo
	@echo "notebooks: $(BIN)/jupyter lab notebooks"

test: .venv/dev.stamp check  ## lint, types and all tests but the slow ones
	$(BIN)/python -m pytest -n 2

test-all: .venv/dev.stamp check  ## the slow tests as well
	$(BIN)/python -m pytest -n 2 -m "slow or not slow"

bench: .venv/bench.stamp  ## speed and curvature against their peers, one core, about 25 minutes
	$(BIN)/python -m benchmarks --report benchmarks/speed.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.curvature --report benchmarks/curvature.json

notebooks: .venv/demo.stamp  ## run all notebooks and keep their outputs, about 3 minutes
	$(BIN)/jupyter nbconvert --to notebook --inplace --execute notebooks/*.ipynb \
		--CoalesceStreamsPreprocessor.enabled=True --ExecutePreprocessor.record_timing=False

check: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

.venv/demo.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e ".[notebooks]"
	touch $@

.venv/dev.stamp: .venv/demo.stamp
	$(PIP) -e ".[dev]"
	touch $@

.venv/bench.stamp: .venv/demo.stamp
	$(PIP) -e ".[bench]"
	-$(PIP) git+https://github.com/epfml/powersgd.git  # what PyPI has under this name is empty
	touch $@

clean:
	rm -rf .venv runs figures data/cache
