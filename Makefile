# make lab opens the workbook, make test proves it. Both build .venv first, once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ARGS   ?=

# TORCH is the build of PyTorch that .venv gets: default (that of requirements.txt), cpu, auto (uv
# looks at the driver), or a CUDA version. Without TORCH the build that is there stays.
BUILT := $(or $(shell sed -n 2p $(READY) 2>/dev/null || sed -n 2p $(READY).was 2>/dev/null),default)
BUILD := $(or $(strip $(TORCH)),$(BUILT))
BUILD := $(if $(filter default auto cpu cu% rocm% xpu,$(BUILD)),$(BUILD),cu$(subst .,,$(BUILD)))

NOTEBOOKS ?= $(sort $(wildcard notebooks/*.ipynb))
NBVAL := -p tests.lean_imports --nbval --nbval-current-env --nbval-cell-timeout 120 \
         --nbval-sanitize-with tests/nbval_sanitize.cfg

# The stored outputs are those of the CPU.
HIDE_GPUS := $(if $(filter 1,$(LABKIT_TEST_GPUS)),,CUDA_VISIBLE_DEVICES=-1)

# More than two cores: much of a test is waiting, for a process that imports torch or for a browser. A class or a notebook
# stays together.
SPREAD := -n 3 --dist loadscope

# A slow line needs longer than uv's 30 s; a shell's own Python paths must not leak into .venv, and
# what is not written down compiled is compiled by each of hundreds of processes.
export UV_HTTP_TIMEOUT ?= 300
unexport PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE
# What decides on builds and hashes stands in the commands below.
unexport UV_TORCH_BACKEND UV_REQUIRE_HASHES UV_NO_VERIFY_HASHES

.DEFAULT_GOAL := help
.PHONY: help env clients cluster horovod tensorflow lab test test-more test-unit test-gpu test-pretended test-notebooks test-torch test-python faults storm bench two-hosts gpu-report elsewhere html \
        notebooks pins clean distclean FORCE

help:
	@echo "make lab             set up and open the workbook"
	@echo "make test            set up and test whatever a change can break: unit, notebooks, browser"
	@echo "make test-more       what takes minutes or other environments: Ray, two hosts, storms, Horovod"
	@echo "make test-unit       the quick part: no notebooks, no browser, nothing marked fresh or slow"
	@echo "make test-gpu        what needs GPUs (make test hides them)"
	@echo "make test-pretended  all notebooks as with 1, 2 and 8 GPUs, on the CPU (some minutes)"
	@echo "make test-notebooks  the notebooks alone (some: NOTEBOOKS=notebooks/06_ring_all_reduce.ipynb)"
	@echo "make test-torch      launcher, backend, strategies, two pages on the oldest PyTorch"
	@echo "make test-python     the quick part on another Python (PYTHON=python3.13), in a .venv of its own"
	@echo "make faults          test the fault table: what users can run into, row by row, with seconds"
	@echo "make storm           signals at random moments, 500 runs (a few minutes)"
	@echo "make storm-resume    20 runs of each technique killed, resumed and compared (half an hour)"
	@echo "make bench           measure our all-reduces against gloo and NCCL here"
	@echo "make two-hosts       train on two hosts on this machine, and record it (root; seven minutes)"
	@echo "make gpu-report      all figures of a GPU server as one page, in 30 minutes at most"
	@echo "make elsewhere       train the same with PyTorch, Horovod and TensorFlow, and record it"
	@echo "make html            the course as a site in build/html, which needs no network"
	@echo "make notebooks       run the notebooks and store their outputs in place"
	@echo "make pins            renew requirements.txt and the pins in tools/*.txt, with hashes"
	@echo "make cluster         add Ray to .venv, for runs on several machines: labkit.run(..., hosts=2)"
	@echo "make horovod         make .venv-horovod, where Horovod runs (4 GB; compiles it: 4 minutes)"
	@echo "make tensorflow      make .venv-tensorflow, where TensorFlow runs (1.5 GB)"
	@echo "make clients         make .venv-clients: other people's trainers, tried on our backend (6 GB)"
	@echo "make env             set up only (.venv, about 6 GB)"
	@echo "make env TORCH=auto  the same with the PyTorch that this machine's driver can run; also"
	@echo "                     TORCH=cpu (no CUDA, 3 GB less), TORCH=12.8 (that CUDA), TORCH=default"
	@echo "make clean           remove what make built; make distclean removes .venv* too"

env: $(READY)
	@:

# The stamp holds the folder it was made in, since a moved or copied .venv is made anew, and the build
# of PyTorch. A version number does not tell builds apart, so another build is installed by force.
ifneq ($(shell sed -n 1p $(READY) 2>/dev/null),$(CURDIR))
STALE := yes
else ifneq ($(BUILD),$(BUILT))
STALE := yes
else ifneq (,$(and $(filter auto,$(TORCH)),$(filter env,$(MAKECMDGOALS))))
STALE := yes
endif
ifdef STALE
$(READY): FORCE
RENEW := --exact --reinstall-package torch --reinstall-package torchvision
endif

FREEZE := $(BIN)/uv pip freeze --quiet --python $(BIN)/python
WHENCE := $(if $(filter default,$(BUILD)),,The build '$(BUILD)' is in PyTorch's own index: is that in reach?)
RETRY  := $(if $(filter default,$(BUILD)),run make env again,make env TORCH=default takes the usual build)
# uv changes nothing before it has every file: after most failures what was ready is ready still.
GIVE_UP = { $(FREEZE) 2>/dev/null | cmp -s - $(VENV)/.before && mv $(READY).was $(READY) \
  && left="$(VENV) is as it was: make lab and make test use it as before." \
  || left="$(VENV) is not complete: $(RETRY)."; \
  echo "make env: uv could not install everything and says why above. $(WHENCE)" >&2; \
  rm -f $(VENV)/.before; echo "make env: $$left" >&2; exit 1; }

$(READY): requirements.txt tools/uv.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make env: no '$(PYTHON)' here. On Debian or Ubuntu:" \
	    "sudo apt install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make env: Python 3.11 or newer is needed, '$(PYTHON)' is $$($(PYTHON) --version)." \
	    "With another one: make env PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make env: '$(PYTHON)' cannot make environments. On Debian or Ubuntu:" \
	    "sudo apt install $(notdir $(PYTHON))-venv" >&2; exit 1; }
	@case '$(BUILD)' in default|auto|cpu|xpu|rocm[1-9]*|cu[1-9][0-9][0-9]) ;; *) \
	  echo "make env: TORCH=$(TORCH) is not a build of PyTorch. Use TORCH=cpu, auto, default or a CUDA" \
	    "version such as 12.8. (make test-torch takes another version: TORCH_VERSION=2.14.0)" >&2; \
	  exit 1; esac
	@$(PYTHON) tools/torch_build.py advice $(BUILD)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  && $(BIN)/pip --version 2>/dev/null | grep -qF "$(CURDIR)/$(VENV)/" \
	  || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
	  -r tools/uv.txt
	@mv -f $(READY) $(READY).was 2>/dev/null && $(FREEZE) > $(VENV)/.before || rm -f $(VENV)/.before
# Compiled once, as pip does: or every new process compiles torch, where nothing may be written.
ifeq ($(BUILD),default)
	@$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode $(RENEW) --require-hashes \
	  -r requirements.txt || $(GIVE_UP)
else
	@$(PYTHON) tools/torch_build.py pins > $(VENV)/pins.txt
	@$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode $(RENEW) --verify-hashes \
	  --torch-backend $(BUILD) -r $(VENV)/pins.txt || $(GIVE_UP)
endif
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@$(BIN)/python -m ipykernel install --sys-prefix >/dev/null
	@printf '%s\n' "$(CURDIR)" $(BUILD) > $@
	@rm -f $(READY).was $(VENV)/.before

# What the extra "cluster" adds to requirements.txt.
cluster: env
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --require-hashes \
	  -r tools/cluster.txt

# Separate environments, where the package's own programs are those of .venv.
ASKED := $(if $(filter command environment,$(firstword $(origin PYTHON))),--python "$(PYTHON)")
MAKE_OTHER = $(BIN)/python tools/other_framework.py $@ $(ASKED) --torch $(BUILD)

horovod: env
	@$(MAKE_OTHER)

tensorflow: env
	@$(MAKE_OTHER)

lab: env
	@$(BIN)/python -m labkit lab $(ARGS)

test: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --summary=none
	LABKIT_LIVE=0 $(BIN)/python -m pytest $(SPREAD) $(NBVAL) -m "not more" tests $(NOTEBOOKS) $(ARGS)

# What is not installed (make clients, cluster, horovod, tensorflow, html; root for two hosts) is skipped and says so. One by one: storms,
# agents and clusters need the cores for themselves.
test-more: env
	$(BIN)/python -m pytest -p no:nbval -m more tests $(ARGS)
	LABKIT_EVERY_SIZE=1 $(BIN)/python -m pytest $(SPREAD) -p no:nbval tests/exercises/test_answers.py $(ARGS)
	$(MAKE) test-pretended PRETENDED=2
	$(MAKE) test-torch

test-notebooks: env
	@$(if $(NOTEBOOKS),$(HIDE_GPUS) LABKIT_LIVE=0 $(BIN)/python -m pytest $(NBVAL) $(NOTEBOOKS) $(ARGS),\
	  echo "make test-notebooks: no notebooks in notebooks/")

test-unit: env
	$(BIN)/python -m pytest $(SPREAD) -p no:nbval -m "not browser and not fresh and not slow and not more" tests $(ARGS)

# What needs GPUs; without any, all of it is skipped and says why.
test-gpu: env
	LABKIT_TEST_GPUS=1 LABKIT_LIVE=0 $(BIN)/python -m pytest -p no:nbval tests/gpu $(ARGS)

# torch behaves as with GPUs, and the CPU computes: tests/pretended says what that covers.
PRETENDED ?= 1 2 8
test-pretended: env
	@for gpus in $(PRETENDED); do echo "$$gpus pretended GPUs"; \
	  LABKIT_PRETEND_GPUS=$$gpus PYTHONPATH=$(CURDIR)/tests/pretended LABKIT_LIVE=0 \
	  $(BIN)/python -m pytest $(SPREAD) $(NBVAL) $(NOTEBOOKS) $(ARGS) || exit 1; done

faults: env
	$(BIN)/python -m pytest -p no:nbval tests/engine/runtime/test_fault_table.py -v --durations=0 $(ARGS)

# By default the oldest of the range in pyproject.toml. Of .venv only uv is used.
TORCH_VERSION ?= $(shell sed -n 's/^ *"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml | head -n 1)
OTHER := .venv-torch-$(TORCH_VERSION)

# The same build of PyTorch, and pages whose outputs depend on its version.
test-torch: env
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@$(BIN)/uv pip install --quiet --python $(OTHER)/bin/python \
	  $(if $(filter default,$(BUILD)),,--torch-backend $(BUILD)) 'torch==$(TORCH_VERSION)' -e '.[course,test]'
	$(HIDE_GPUS) $(OTHER)/bin/python -m pytest $(SPREAD) -p no:nbval -m "not more" \
	  tests/engine/runtime/test_launch.py tests/backend tests/strategies $(ARGS)
	$(HIDE_GPUS) LABKIT_LIVE=0 $(OTHER)/bin/python -m pytest $(SPREAD) $(NBVAL) \
	  notebooks/10_*.ipynb notebooks/11_*.ipynb $(ARGS)

# 3.11 to 3.14. The environment is .venv-python3.13 for PYTHON=python3.13 or a path to one.
test-python:
	@$(MAKE) --no-print-directory test-unit \
	  VENV=.venv-python$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

storm: env
	cd tests && $(HIDE_GPUS) $(CURDIR)/$(BIN)/python storm.py $(ARGS)

storm-resume: env
	cd tests && $(HIDE_GPUS) $(CURDIR)/$(BIN)/python storm.py --resume $(ARGS)

bench: env
	@$(BIN)/python -m labkit bench $(ARGS)

# Two network namespaces with a cable of 10 and 1 Gb/s: they end with the command, whatever ends it.
two-hosts: env
	@PYTHONPATH=$(CURDIR) $(BIN)/python tools/two_hosts.py $(ARGS)

gpu-report: env
	@PYTHONPATH=$(CURDIR) $(BIN)/python tools/gpu_report.py $(ARGS)

# What make horovod and make tensorflow have made takes part.
elsewhere: env
	@PYTHONPATH=$(CURDIR) $(BIN)/python tools/elsewhere.py $(ARGS)

# Everything is read, nothing runs. A warning, such as a broken link, ends it.
html: $(VENV)-site/.ready
	@$(VENV)-site/bin/sphinx-build -W --keep-going -q -c tools/site . build/html
	@echo "the site: build/html/index.html"

# Other people's trainers, which tests/clients runs on our backend.
clients: $(VENV)-clients/.ready
	@:

$(VENV)-site/.ready $(VENV)-clients/.ready: $(VENV)-%/.ready: tools/%.txt | env
	@$(BIN)/uv venv --quiet --clear --no-project --python $(BIN)/python $(VENV)-$*
	@$(BIN)/uv pip install --quiet --python $(VENV)-$*/bin/python --compile-bytecode --require-hashes -r $<
	@touch $@

notebooks: env
	@$(BIN)/python tools/execute_notebooks.py $(NOTEBOOKS)

# Keeps the versions that are pinned already; newer ones: make pins ARGS=--upgrade
PINS := --universal --python-version 3.11 --generate-hashes --no-annotate --quiet \
        --custom-compile-command "make pins"
EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["cluster"])
# What PyTorch 2.0.1 brings and needs on a GPU alone: 160 MB. (The other CUDA libraries it loads at its start.)
UNUSED := $(addprefix --no-emit-package ,triton lit nvidia-cusolver-cu11)
pins: env
	$(BIN)/uv pip compile $(PINS) $(ARGS) --extra course --extra test pyproject.toml -o requirements.txt
	echo uv | $(BIN)/uv pip compile $(PINS) $(ARGS) - -o tools/uv.txt
	$(BIN)/python -c '$(EXTRA)' | $(BIN)/uv pip compile $(PINS) $(ARGS) -c requirements.txt - \
	  -o tools/cluster.txt
	$(BIN)/uv pip compile $(PINS) $(ARGS) $(UNUSED) --group horovod -o tools/horovod.txt
	$(BIN)/uv pip compile $(PINS) $(ARGS) --group tensorflow -o tools/tensorflow.txt
	$(BIN)/uv pip compile $(PINS) $(ARGS) --group site -o tools/site.txt
	$(BIN)/uv pip compile $(PINS) $(ARGS) --group clients -o tools/clients.txt

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache notebooks/.ipynb_checkpoints
	find labkit workbook tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VENV)-*
