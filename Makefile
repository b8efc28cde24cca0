# Every target builds what it needs in .venv, from nothing but python3 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := cli,report,test,dev,hf,triton,book
PYTEST_ARGS ?=
MINUTES ?= 30
SEED ?=
SOAK_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: demo test test-all test-hf soak book lint format clean help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(STAMP) ## draw the zigzag layout, then verify every algorithm on 4 ranks of the CPU
	$(BIN)/rfa draw zigzag
	$(BIN)/rfa verify --world-size 4 --device cpu

PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

test: $(STAMP) ## run the quick tests that need no GPU (PYTEST_ARGS=... adds arguments)
	$(PYTEST) -m "not gpu and not slow"

test-all: test ## and then the slow ones: exhaustive products, long cases of the interpreters
	$(PYTEST) -m "slow and not gpu"

# Each version of transformers in a folder of its own, before the rest of .venv. The newest needs a newer huggingface_hub.
HF_VERSIONS ?= 4.46.3 4.57.6 5.23.0
HF_FOLDERS := $(HF_VERSIONS:%=build/transformers/%)

test-hf: $(HF_FOLDERS) ## run the tests of Hugging Face models with several versions of transformers (HF_VERSIONS=...)
	for folder in $(HF_FOLDERS); do \
	    PYTHONPATH=$$folder:. $(BIN)/python -m pytest tests/adapters $(PYTEST_ARGS) || exit 1; done

build/transformers/%: | $(STAMP)
	@echo "setting up $@"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $@.part transformers==$*
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --target $@.part \
	    $$(sed -nE 's/^Requires-Dist: ((huggingface-hub|tokenizers)[^;]*)$$/\1/p' $@.part/transformers-*.dist-info/METADATA | tr -d ' ')
	@mv $@.part $@

soak: $(STAMP) ## random calls, lost ranks, ever new packs, for MINUTES=30 from a SEED= (not in CI)
	PYTHONPATH=tests:tests/helpers $(BIN)/python -m soak --minutes $(MINUTES) $(SEED:%=--seed %) $(SOAK_ARGS)

book: $(STAMP) ## make the lab's book in build/book, in English and Chinese; says which file to open
	$(BIN)/python docs/lab/book/build.py

lint: $(STAMP) ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## rewrite the files in the project's style
	$(BIN)/python -c "from ring_flash_attn.api.families import write_stub; write_stub()"
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, build outputs and caches
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so that an interrupted install is done again. -qq: pip's errors only.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
