PYTHON ?= python3
BIN := .venv/bin
PRUNE = $(BIN)/python -m emp_llm.prune --model scripts/demo/model --evaluate demo --overwrite

.PHONY: demo test setup clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# The main job on the model the repository carries, then what it should be judged against: Wanda with as many weights
# removed, EMP by magnitude alone, and plain magnitude pruning at 50 %.
demo: setup
	$(PRUNE) --calibration demo --output demo-run/emp-wanda
	$(PRUNE) --method wanda --match demo-run/emp-wanda --output demo-run/wanda \
		--activations demo-run/emp-wanda/emp_llm/activations.safetensors
	$(PRUNE) --method emp-magnitude --output demo-run/emp-magnitude
	$(PRUNE) --method magnitude --sparsity 0.5 --output demo-run/magnitude

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

clean:
	rm -rf .venv demo-run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
