PYTHON ?= python3
BIN := .venv/bin
MODEL = scripts/demo/model
RUN = demo-run
PRUNE = $(BIN)/python -m emp_llm.prune --model $(MODEL) --overwrite
EVALUATE = $(BIN)/python -m emp_llm.evaluate --suite demo --overwrite

.PHONY: demo test setup clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# The main job on the model the repository carries, and what it should be judged against: Wanda with as many weights removed,
# EMP by magnitude alone, and plain magnitude pruning at 50 %; then the suite on all of them, in one table.
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

clean:
	rm -rf .venv demo-run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
