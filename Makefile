# `make demo` and `make test` do all their set-up on a fresh machine, in .venv, and then their job.
# `make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu` takes torch and torchvision, and only
# them, from that index: without it, from the usual one, which may offer CUDA builds (constraints.txt).
PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all integrations same-bits mutants fuzz bench gpu notebooks pages docs docs-serve release check clean

DEMO = $(foreach name,low mid high low-first low-last accordion,--schedules $(name))
demo: .venv/demo.stamp  ## a language model, 6 schedules at their own rates, 3 seeds: 2 to 3 minutes
	$(BIN)/regimes ablate lm-demo --seeds 3 --first-seed 3000 --jobs 2 $(DEMO) --out runs/demo
	$(BIN)/regimes figure curves runs/demo --out figures --name demo
	@echo "notebooks: $(BIN)/jupyter lab notebooks"

test: .venv/dev.stamp check  ## lint, types and all tests but the slow ones
	$(BIN)/python -m pytest -n 3

test-all: .venv/dev.stamp check  ## the slow tests as well
	$(BIN)/python -m pytest -n 2 -m "not integrations"

integrations: .venv-integrations/stamp  ## Hugging Face's Trainer, Accelerate, Lightning, on 2 processes each
	.venv-integrations/bin/python -m pytest -m integrations tests/test_integrations.py \
		tests/test_reporters.py tests/test_cluster_examples.py

same-bits: .venv/dev.stamp  ## train 49 small runs with the code of before and of now, compare byte for byte
	$(BIN)/python -m benchmarks.same_bits

mutants: .venv/dev.stamp  ## 300 single-line bugs, one at a time: which do the tests not see? Hours; continued
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.mutants

FUZZ ?= 600
fuzz: .venv/dev.stamp  ## configurations, records, folders and calls of strangers for 10 minutes (FUZZ=60: one), a fresh seed a round
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --seconds $(FUZZ)

bench: .venv/bench.stamp  ## speed and curvature against their peers, one core, about 25 minutes
	$(BIN)/python -m benchmarks --report benchmarks/speed.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.curvature --report benchmarks/curvature.json

GPU ?=
gpu: .venv/demo.stamp  ## is a GPU right, how fast is it, and a study; without one a rehearsal; GPU="--data cifar10.tar.xz"
	$(BIN)/python -m benchmarks.gpu $(GPU)

notebooks: .venv/demo.stamp  ## run all notebooks and keep their outputs, about 3 minutes
	$(BIN)/jupyter nbconvert --to notebook --inplace --execute notebooks/*.ipynb \
		--CoalesceStreamsPreprocessor.enabled=True --ExecutePreprocessor.record_timing=False

pages: .venv/demo.stamp  ## docs/findings.md and docs/findings/ from the records; only numbers of changed archives are computed
	OMP_NUM_THREADS=1 $(BIN)/python -m analysis.findings

docs: .venv/docs.stamp  ## the documentation as a site in site/, from files alone; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

docs-serve: .venv/docs.stamp  ## the same while it is written, on http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

PYTHONS ?= python3.11 python3.12 python3.13
release: .venv/dev.stamp check  ## wheel and sdist in dist/, both tried in an empty environment of each of PYTHONS
	rm -rf dist
	$(BIN)/hatchling build
	for python in $(PYTHONS); do TORCH_INDEX=$(TORCH_INDEX) sh tests/released.sh $$python dist/*.whl dist/*.tar.gz || exit 1; done

check: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv/demo.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifneq ($(TORCH_INDEX),)
	$(PIP) --no-deps --index-url $(TORCH_INDEX) torch torchvision
endif
	$(PIP) -e ".[notebooks]"
	touch $@

.venv/dev.stamp: .venv/demo.stamp
	$(PIP) -e ".[dev]"
	touch $@

.venv/docs.stamp: .venv/demo.stamp
	$(PIP) -e ".[docs]"
	touch $@

.venv-integrations/stamp: pyproject.toml constraints.txt
	test -x .venv-integrations/bin/python || $(PYTHON) -m venv .venv-integrations
ifneq ($(TORCH_INDEX),)
	.venv-integrations/bin/pip install --quiet --no-deps -c constraints.txt --index-url $(TORCH_INDEX) torch torchvision
endif
	.venv-integrations/bin/pip install --quiet -c constraints.txt -e ".[transformers,lightning,tensorboard,wandb]" \
		pytest pytest-timeout hypothesis beartype torchx
	touch $@

.venv/bench.stamp: .venv/demo.stamp
	$(PIP) -e ".[bench]"
	-$(PIP) git+https://github.com/epfml/powersgd.git  # what PyPI has under this name is empty
	touch $@

clean:
	rm -rf .venv .venv-integrations runs figures site dist data/cache
