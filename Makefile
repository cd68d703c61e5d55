# `make run` and `make test` are all a newcomer needs: each alone installs what it needs and does its job.
PYTHON ?= python3
CONFIG ?= quickstart
ARGS   ?=
RUN    ?= runs/$(basename $(notdir $(CONFIG)))
BIN    := .venv/bin
STAMP  := .venv/.installed

.PHONY: run test test-slow setup check test-deps clean

run: $(STAMP)
	@test -e $(RUN)/summary.json || $(BIN)/airmoe train --config $(CONFIG) --run $(RUN) $(ARGS) \
		$$(test -e $(RUN)/checkpoint && echo --resume)
	@$(BIN)/airmoe eval --run $(RUN) --pictures $(RUN)/examples.png
	@printf '\nexamples (image, truth, prediction, overlay): %s\n' $(RUN)/examples.png

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is older; try: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@test -d .venv || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a few minutes the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch torchvision
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[offline,dev]'
	@touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-deps:
	@echo "no system packages are needed by the tests so far"

clean:
	rm -rf .venv .airmoe runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
