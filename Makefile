# `make run` and `make test` are all a newcomer needs: each alone installs what it needs and does its job.
PYTHON ?= python3
CONFIG ?= quickstart
PORT   ?= 8000
ARGS   ?=
RUN    ?= runs/$(basename $(notdir $(CONFIG)))
SUDO   ?= $(shell test "$$(id -u)" = 0 || echo sudo)
BIN    := .venv/bin
STAMP  := .venv/.installed

.PHONY: run test test-slow setup check bench chaos test-deps clean

run: $(STAMP)
	@test -e $(RUN)/summary.json || $(BIN)/airmoe train --config $(CONFIG) --run $(RUN) $(ARGS) \
		$$(test -e $(RUN)/checkpoint && echo --resume)
	@exec $(BIN)/airmoe serve --run $(RUN) --port $(PORT) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

setup: $(STAMP)

# speed as ratios, of a trained run; exits 1 where a target is missed
bench: $(STAMP)
	$(BIN)/airmoe bench --run $(RUN)

# kills experts of the server that `make run` started, under load
chaos: $(STAMP)
	$(BIN)/airmoe chaos --url http://127.0.0.1:$(PORT)

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
	@command -v prometheus >/dev/null && command -v chromium >/dev/null && command -v curl >/dev/null || \
		{ $(SUDO) apt-get update -qq && \
		  $(SUDO) env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			prometheus chromium curl; }  # RUNLEVEL=1: installs, starts no service

clean:
	rm -rf .venv .airmoe runs segmented build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
