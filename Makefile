# make demo    plan a 70B model on 64 GPUs, then train sharded programs beside one device
# make test    linters, types, all tests
# make lint    linters and types alone
# make clean   remove the virtual environment and what was built
#
# Each makes a virtual environment in .venv on first use. PYTHON names the interpreter, 3.11 or
# later; PIP_FIND_LINKS, a folder of wheels, is where a CPU build of torch may lie.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD := build
PYTEST := pytest -n auto --dist loadgroup

# results do not depend on how many threads a sum is split over
test: export OMP_NUM_THREADS := 1

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	mkdir -p $(BUILD)
	$(BIN)/autopar plan llama3_70b --cluster 8x8:h100-sxm --seq-len 8192 --global-batch 512 \
		--precision bf16 -o $(BUILD)/llama3_70b.json
	$(BIN)/autopar verify gpt_tiny --cluster local:4
	$(BIN)/autopar verify gpt_tiny --cluster local:4 --pin tensor=2 --pin pipeline=2

# all of it runs, whatever fails first
test: $(VENV)/installed-dev
	@status=0; $(MAKE) --no-print-directory lint || status=$$?; \
		echo $(BIN)/python -m $(PYTEST); $(BIN)/python -m $(PYTEST) && exit $$status

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(BUILD) dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "autopar needs Python 3.11 or later; found $$($(PYTHON) --version): make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/installed
