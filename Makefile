# `make demo` and `make test` do all their set-up on a fresh machine, in .venv, and then their job.
# `make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu` takes torch and torchvision, and only
# them, from that index: without it, from the usual one, which may offer CUDA builds (constraints.txt).
# Where this variable is set, each process would compile torch's modules again, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin
# --no-compile: Python compiles a module at its first import; all at once take more than a minute.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
define VENV
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) torch torchvision)
endef

.PHONY: help demo test test-all durations integrations minima newest lock same-bits mutants fuzz bench race gpu notebooks pages docs docs-serve release check pyright clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

DEMO = $(foreach name,low mid high low-first low-last accordion,--schedules $(name))
demo: .venv/demo.stamp  ## train a small language model under 6 schedules, 3 seeds, and draw the result: 3 minutes
	$(BIN)/regimes ablate lm-demo --seeds 3 --first-seed 3000 --jobs 2 $(DEMO) --out runs/demo
	$(BIN)/regimes figure curves runs/demo --out figures --name demo
	@echo "notebooks: $(BIN)/jupyter lab notebooks"

BALANCED = --dist loadfile --no-loadscope-reorder# files in the order that tests/conftest.py gives them
test: .venv/dev.stamp  ## checks, and all tests but the slow ones
	@$(MAKE) --no-print-directory --jobs 2 check .venv/compiled.stamp
	$(BIN)/python -m pytest -n 4 $(BALANCED)

# What the tests import, compiled once, beside the type checker, which uses one core: in a fresh clone
# each of the four processes would compile all of it for itself. What fails here fails in the tests.
.venv/compiled.stamp: .venv/dev.stamp
	@$(BIN)/python -m pytest --collect-only -qq > /dev/null || true
	touch $@

test-all: .venv/dev.stamp check  ## all tests, the slow ones too; more than an hour on 2 cores
	CHECKED_CALLS=inf $(BIN)/python -m pytest -n 3 $(BALANCED) -m "not integrations"

durations: .venv/dev.stamp  ## write tests/durations.txt anew: which cases `make test` runs, and their order; 15 minutes on 2 idle cores
	$(BIN)/python -m pytest -n 2 $(BALANCED) --record-durations

integrations: .venv-integrations/stamp  ## test Hugging Face's Trainer, Accelerate and Lightning, on real processes
	.venv-integrations/bin/python -m pytest -m integrations tests/rooms/integrations/test_integrations.py \
		tests/rooms/cli/test_reporters.py tests/strangers/test_cluster_examples.py

minima: .venv-minima/stamp  ## test every room with the lowest versions that pyproject.toml admits, about 5 minutes
	OMP_NUM_THREADS=1 .venv-minima/bin/python -m pytest -n 2 -W default --disable-warnings tests/rooms tests/oracles \
		tests/processes/test_fsdp_collectives.py

newest: .venv-newest/stamp  ## test with the newest torch, transformers, accelerate and lightning of the index; half an hour
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n 2 -W default --disable-warnings tests/rooms tests/oracles \
		tests/processes/test_fsdp_collectives.py
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -m integrations -W default --disable-warnings \
		tests/rooms/integrations/test_integrations.py

UV ?= uv
lock:  ## write constraints.txt anew (LOCK=--upgrade: with the newest versions); then run test-all and integrations
	sh tests/locked.sh $(UV) $(LOCK)

same-bits: .venv/dev.stamp  ## train small runs with the code of an earlier commit and with yours: bytes, weights, memory, launches; 8 minutes
	$(BIN)/python -m benchmarks.same_bits

mutants: .venv/dev.stamp  ## put in single-line bugs one at a time, and list those that no test finds; hours, can be continued
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.mutants

FUZZ ?= 600
fuzz: .venv/dev.stamp  ## random bad input for 10 minutes (FUZZ=60: one minute): errors yes, tracebacks no
	OMP_NUM_THREADS=1 $(BIN)/python tests/shared/fuzz.py --seconds $(FUZZ)

bench: .venv/bench.stamp  ## speed and curvature against other libraries, growth with units and runs, one core, about 30 minutes
	$(BIN)/python -m benchmarks --report benchmarks/speed.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.curvature --report benchmarks/curvature.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.scale --report benchmarks/scale.json

MINUTES ?= 600
race: .venv/dev.stamp  ## seconds until a loss on a slow link, all methods; Linux, root; MINUTES=60: an hour of it, can be continued
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.race --minutes $(MINUTES)

GPU ?=
gpu: .venv/demo.stamp  ## test a GPU: correctness, speed, the paper's setting; without a GPU a rehearsal; GPU="--parts speed"
	$(BIN)/python -m benchmarks.gpu $(GPU)

notebooks: .venv/demo.stamp  ## run all notebooks and keep their outputs, about 3 minutes
	$(BIN)/jupyter nbconvert --to notebook --inplace --execute notebooks/*.ipynb \
		--CoalesceStreamsPreprocessor.enabled=True --ExecutePreprocessor.record_timing=False

pages: .venv/demo.stamp  ## write docs/findings.md and docs/findings/ from the records; compute only numbers of changed archives
	OMP_NUM_THREADS=1 $(BIN)/python -m analysis.findings

docs: .venv/docs.stamp  ## build the documentation in site/; a warning is an error
	rm -rf build/docs site
	$(BIN)/python docs/generate.py build/docs
	$(BIN)/python -m sphinx --jobs auto --fail-on-warning --quiet -c docs -d build/doctrees build/docs site
	@echo "site/index.html"

docs-serve: .venv/docs.stamp  ## show the site on http://127.0.0.1:8000 and build it again after each change
	$(BIN)/sphinx-autobuild --pre-build "$(BIN)/python docs/generate.py build/docs" --ignore "$(CURDIR)/build/*" \
		--watch docs --watch regimes -c docs -d build/doctrees build/docs site

PYTHONS ?= python3.11 python3.12 python3.13
release: .venv/dev.stamp check  ## build wheel and sdist in dist/, and try both in an empty environment of each of PYTHONS
	rm -rf dist
	$(BIN)/hatchling build
	for python in $(PYTHONS); do TORCH_INDEX=$(TORCH_INDEX) sh tests/released.sh $$python dist/*.whl dist/*.tar.gz || exit 1; done

check: .venv/dev.stamp  ## lint, layout, types and order of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

pyright: .venv/dev.stamp  ## check the scripts of tests/strangers/typed with pyright, and with mypy --strict
	$(PIP) "pyright[nodejs]"
	$(BIN)/python -m pytest -m "" tests/strangers/test_typed_doors.py

.venv/demo.stamp: pyproject.toml constraints.txt
	$(VENV)
	$(PIP) -e ".[notebooks,curvature]"
	touch $@

.venv/dev.stamp: pyproject.toml constraints.txt
	$(VENV)
	$(PIP) -e ".[dev]"
	touch .venv/demo.stamp $@  # dev has all of it

.venv/docs.stamp: .venv/demo.stamp
	$(PIP) -e ".[docs]"
	touch $@

.venv-integrations/stamp: pyproject.toml constraints.txt
	test -x .venv-integrations/bin/python || $(PYTHON) -m venv .venv-integrations
ifneq ($(TORCH_INDEX),)
	.venv-integrations/bin/pip install --quiet --no-deps -c constraints.txt --index-url $(TORCH_INDEX) torch torchvision
endif
	.venv-integrations/bin/pip install --quiet -c constraints.txt -e ".[transformers,lightning,tensorboard,wandb]" \
		pytest pytest-timeout hypothesis beartype
	.venv-integrations/bin/pip install --quiet torchx==0.7.0  # asks for an older urllib3 than constraints.txt has
	touch $@

LOWEST ?= python3.11# which still has wheels of them all
.venv-minima/stamp: pyproject.toml
	test -x .venv-minima/bin/python || $(LOWEST) -m venv .venv-minima
	.venv-minima/bin/pip install --quiet uv
ifneq ($(TORCH_INDEX),)
	.venv-minima/bin/uv pip install --quiet --python .venv-minima/bin/python --resolution lowest-direct --no-deps \
		--index-url $(TORCH_INDEX) $$(grep -oE '"torch(vision)?>=[0-9.]+' pyproject.toml | tr -d '"')
endif
	.venv-minima/bin/uv pip install --quiet --python .venv-minima/bin/python --resolution lowest-direct \
		-e ".[notebooks,curvature,text,tensorboard,cluster,tests]"
	touch $@

# Not constraints.txt: `rm -r .venv-newest` for what the index has today.
.venv-newest/stamp: pyproject.toml
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet uv
ifneq ($(TORCH_INDEX),)
	.venv-newest/bin/uv pip install --quiet --python .venv-newest/bin/python --no-deps --index-url $(TORCH_INDEX) \
		torch torchvision
endif
	.venv-newest/bin/uv pip install --quiet --python .venv-newest/bin/python \
		-e ".[notebooks,curvature,text,tensorboard,cluster,transformers,lightning,tests]"
	touch $@

.venv/bench.stamp: .venv/demo.stamp
	$(PIP) -e ".[bench]"
	-$(PIP) git+https://github.com/epfml/powersgd.git  # what PyPI has under this name is empty
	touch $@

clean:  ## remove .venv and everything that was made
	rm -rf .venv .venv-integrations .venv-minima .venv-newest runs figures site build dist data/cache
