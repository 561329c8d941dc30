PYTHON ?= python3
BIN := .venv/bin
MODEL := scripts/demo/model

.PHONY: demo test setup clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# The main job on the model the repository carries; then the baseline it should be judged against.
demo: setup
	$(BIN)/python -m emp_llm.prune --model $(MODEL) --calibration demo --evaluate demo \
		--method emp-wanda --output demo-run/emp-wanda --overwrite
	$(BIN)/python -m emp_llm.prune --model $(MODEL) --evaluate demo \
		--method magnitude --sparsity 0.5 --output demo-run/magnitude --overwrite

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

clean:
	rm -rf .venv demo-run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
