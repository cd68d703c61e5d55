# `make run` and `make test` are all a newcomer needs: each alone installs what it needs and does its job.
PYTHON ?= python3
CONFIG ?= quickstart
PORT   ?= 8000
ARGS   ?=
TRAINED = $(or $(RUN),runs/$(basename $(notdir $(CONFIG))))
SUDO   ?= $(shell test "$$(id -u)" = 0 || echo sudo)
BIN    := .venv/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
STAMP  := .venv/.installed
SERVED  = $(if $(or $(RUN),$(filter-out file,$(origin CONFIG))),--run $(TRAINED))
TERMS   = Trained on CamVid and LabelMe, which are for research: use the weights for research, not commercially.
TOOLS  := .venv/.tools-installed

.PHONY: run train street test test-slow test-anywhere test-cluster test-aws-file test-image test-gpu wheel lock setup check bench bench-peers chaos test-deps clean

# serves the model in the box; RUN=runs/quickstart serves what `make train` has made, and so does CONFIG=quickstart
run: $(STAMP)
	@exec $(BIN)/airmoe serve $(SERVED) --port $(PORT) $(ARGS)

# interrupted training goes on where it stopped
train: $(STAMP)
	@test -e $(TRAINED)/summary.json || $(BIN)/airmoe train --config $(CONFIG) --run $(TRAINED) $(ARGS) --resume-or-begin
	@echo "trained: make run RUN=$(TRAINED)"

# makes the model in the box again, of DATA/camvid and DATA/labelme; SCORES='--scores TITLE=FILE' adds others to its card
street: $(STAMP)
	@test -n "$(DATA)" || { echo "say where the photographs are: make street DATA=DIR, with DIR/camvid and DIR/labelme"; exit 1; }
	@test -e runs/street/summary.json || $(BIN)/airmoe train --config street --set data.root=$(DATA) --run runs/street $(ARGS) \
		--resume-or-begin
	@$(BIN)/airmoe eval --run runs/street --split val --json > runs/street/unseen.json
	@$(BIN)/airmoe export --run runs/street --checkpoint last --out airmoe_ray/shipped/street --terms "$(TERMS)" \
		--command "make street DATA=DIR" --scores "places and drawings it has not seen=runs/street/unseen.json" $(SCORES)

test: $(TOOLS)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(TOOLS)
	$(BIN)/python -m pytest -m slow

# as other machines would run them: instruction sets, threads, a user that is not root, a folder with a space, and other
# Pythons that have the project installed: PYTHONS='DIR/bin/python'
test-anywhere: $(TOOLS)
	$(BIN)/python tests/anywhere.py $(PYTHONS)

# the on-prem file on three hosts made of namespaces, each with its own sshd, and cluster.yaml on such hosts that run the image:
# needs root, openssh-server, rsync, iproute2, and what test-image needs (`make test-deps`). QUICK=1, for CI, leaves out what
# would cost it more than six minutes: cluster.yaml, for which the image is built, and GPUs on hosts.
test-cluster: $(TOOLS)
	$(BIN)/python -m pytest -m 'cluster and not slow' -n 2 --dist loadfile -rP tests/cluster
	$(if $(QUICK),,$(BIN)/python -m pytest -m 'cluster and slow' -rP tests/cluster)

# of these, cluster.yaml alone, its provider replaced: needs sudo besides
test-aws-file: $(TOOLS)
	$(BIN)/python -m pytest -m cluster -rP tests/cluster/test_aws_file.py

# the Dockerfile, built and run by podman, without a registry: needs root, podman, runc, debootstrap (`make test-deps`)
test-image: $(TOOLS)
	$(BIN)/python -m pytest -m image -rP tests/deploy

# on a machine with a GPU: parity, memory, and a table of figures to send us (docs/gpu.md)
test-gpu: $(TOOLS)
	$(BIN)/python -m pytest -m gpu tests/gpu
	-$(BIN)/airmoe bench --only serve --only overhead --only model --run street --json > gpu-bench.json
	@echo "gpu-bench.json: please send it with the output of nvidia-smi"

setup: $(TOOLS)

# what `ray up` sends to the hosts: the project, and the versions it was tested with
wheel: $(TOOLS)
	@rm -rf build dist
	@$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@cp constraints.txt dist/
	@ls dist/*.whl

# the versions that are installed here become those of everybody: here, on hosts (`make wheel`) and in images
lock: $(TOOLS)
	@sed '/^$$/q' constraints.txt > constraints.new
	@$(BIN)/pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu$$//' >> constraints.new
	@mv constraints.new constraints.txt

# speed as ratios, of a trained run; exits 1 where a target is missed
bench: $(STAMP)
	$(BIN)/airmoe bench --run $(TRAINED)

# the same model on Ray Serve and on Flower, installed beside ours in .airmoe/peers
bench-peers: $(STAMP)
	$(BIN)/airmoe bench --only peer_serve --only peer_flower

# kills experts of the server that `make run` started, under load
chaos: $(STAMP)
	$(BIN)/airmoe chaos --url http://127.0.0.1:$(PORT)

# what running needs, and no more
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is older; try: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@test -d .venv || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a few minutes the first time)"
	@$(PIP) torch torchvision
	@$(PIP) --editable .
	@touch $@

# what tests, checks and the wheel need besides
$(TOOLS): $(STAMP)
	@echo "installing what tests and checks need (a minute the first time)"
	@$(PIP) --editable '.[dev]'
	@touch $@

check: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-deps:
	@for part in prometheus chromium curl sshd ssh rsync ip unshare pgrep sudo podman runc debootstrap; do \
		PATH="$$PATH:/usr/sbin:/sbin" command -v $$part >/dev/null || missing=yes; done; test -z "$$missing" || \
		{ $(SUDO) apt-get update -qq && \
		  $(SUDO) env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			prometheus chromium curl openssh-server openssh-client rsync iproute2 util-linux procps sudo \
			podman runc debootstrap; }  # RUNLEVEL=1: installs, starts no service

clean:
	rm -rf .venv .airmoe runs segmented build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
