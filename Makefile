PYTHON ?= python3
BIN := .venv/bin
MODEL = scripts/demo/model
RUN = demo-run
PRUNE = $(BIN)/emp-llm prune --model $(MODEL) --overwrite
EVALUATE = $(BIN)/emp-llm evaluate --suite demo --overwrite

.PHONY: demo test docs setup clean

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

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Every command of README.md and docs/, run as written, its output compared.
docs: setup
	$(BIN)/python scripts/run_docs.py

clean:
	rm -rf .venv demo-run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
