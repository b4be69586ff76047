# Bare `make` lists the targets.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help all quick ncu sanitize compare plots test test-versions clean
SHELL := bash

SCRIPTS := $(sort $(wildcard [0-9][0-9]_*.py))
NUMBERS := $(foreach script,$(SCRIPTS),$(firstword $(subst _, ,$(script))))
.PHONY: $(NUMBERS)

# ---- Which Python. `make PYTHON=...` is used as it is; else `python3`, if it can run what is asked for; else .venv.

PYTHON := python3

# A program that prints what a Python lacks of the modules named; where it lacks nothing, --save if there is a GPU to
# measure, and the interpreter is not asked for in its place. Without a GPU the kernels run in Triton's interpreter,
# which fails in loops under numpy 2.4 and newer (3.6 does, 3.7 no longer).
define LACKS
import importlib, os, sys
lacks, modules = [], {}
def numbers(name):
    return [int(part) for part in modules[name].__version__.split(".")[:2]]
for name in sys.argv[1:]:
    try:
        modules[name] = importlib.import_module(name)
    except Exception:
        lacks.append(name)
if sys.version_info < (3, 10):
    lacks.append("Python 3.10 or newer")
if "triton" in modules and numbers("triton") < [3, 6]:
    lacks.append("triton 3.6 or newer")
if not lacks and not modules["torch"].cuda.is_available():
    if numbers("triton") < [3, 7] and numbers("numpy") >= [2, 4]:
        lacks.append("a numpy older than 2.4, which Triton 3.6's interpreter needs without a GPU")
gpu = not lacks and modules["torch"].cuda.is_available()
print(", ".join(lacks) or "--save" * (gpu and os.environ.get("TRITON_INTERPRET", "0") == "0"))
endef
ASK = sed -n '/^define LACKS/,/^endef/ {//!p}' $(firstword $(MAKEFILE_LIST)) | $(PYTHON) -W ignore - $(NEEDED)

ifneq ($(filter compare,$(MAKECMDGOALS)),)
ifeq ($(and $(OLD),$(NEW)),)
$(error make compare OLD=results/a NEW=results/b: two results folders, or two files)
endif
endif

ifneq ($(filter all quick ncu sanitize compare plots test $(NUMBERS),$(MAKECMDGOALS)),)
NEEDED := torch triton numpy tabulate $(if $(filter test,$(MAKECMDGOALS)),pytest hypothesis)
ifeq ($(origin PYTHON),file)
FOUND := $(shell $(ASK) || echo "a Python that starts")
MISSING := $(filter-out --save,$(FOUND))
ifneq ($(MISSING),)
PYTHON := .venv/bin/python
READY := .venv/ready
endif
endif
endif

# Made once, and again when requirements.txt changes; pip reads PIP_CONSTRAINT and its like from the environment.
.venv/ready: requirements.txt
	@echo "python3 lacks: $(MISSING). Making .venv from requirements.txt." >&2
	python3 -m venv --clear .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

# ---- Targets

help:
	@echo "make all      every step in order; saves results/<gpu>/ where there is a GPU to measure"
	@echo "make NN       one step:"
	@$(foreach script,$(SCRIPTS),echo "  make $(firstword $(subst _, ,$(script)))       $$(head -n 1 $(script) | tr -d '"')";)
	@echo "make quick    every step as a smoke run: short windows, nothing saved"
	@echo "make ncu      DRAM counters of every kernel, with Nsight Compute; saves results/<gpu>/counters.json"
	@echo "make sanitize   every kernel under compute-sanitizer: memory, initialization, races; saves sanitize.json there"
	@echo "make compare OLD=results/a NEW=results/b   two runs, row by row: better, worse or within noise"
	@echo "make plots    SVGs from results/, beside its tables; measures nothing, needs matplotlib"
	@echo "make test     the tests"
	@echo "make test-versions   those that need no GPU, under each Triton from 3.6 on; VERSIONS='3.6 newest' picks some"
	@echo "make clean    remove .venv, .versions/, plots/ and Python's caches; results/ stays"
	@echo "Options: PYTHON=/path/to/python (used as it is; without it: python3 if it has what is needed, else"
	@echo "a .venv is made), ARGS='--n 8192' (passed on by all but make all, quick and clean)"

# --save or nothing. Importing torch takes seconds, so the answer found above serves; not where a variable is given, as
# TRITON_INTERPRET=1 behind `make all`, which $(shell) does not get before GNU make 4.4, or where there was none yet.
SET_SAVE = save=$(if $(MAKEOVERRIDES),,$(filter --save,$(FOUND))); save=$${save:-$$($(ASK) | grep -x -e --save)}

# Most of a check's time is compilation, of which one process keeps few cores busy: all of them go first, at once, and
# fill Triton's cache. Where one fails, its script says so when it is its turn.
all: $(READY)
	@$(SET_SAVE); \
	if [ "$$save" ]; then echo "== every check, side by side: the kernels are compiled" >&2; \
	printf '%s\n' $(SCRIPTS) | xargs -I{} -P 0 $(PYTHON) {} --check >/dev/null 2>&1; fi; \
	for script in $(wildcard common.py) $(SCRIPTS); do echo "== $$script" >&2; $(PYTHON) $$script $$save || exit; done

quick: $(READY)
	@for script in $(SCRIPTS); do echo "== $$script" >&2; $(PYTHON) $$script --quick || exit; done

$(NUMBERS): $(READY)
	@$(PYTHON) $(filter $@_%,$(SCRIPTS)) $(ARGS)

ncu: $(READY)
	@$(SET_SAVE); $(PYTHON) counters.py $$save $(ARGS)

sanitize: $(READY)
	@$(SET_SAVE); $(PYTHON) sanitize.py $$save $(ARGS)

compare: $(READY)
	@$(PYTHON) compare.py "$(OLD)" "$(NEW)" $(ARGS)

plots: $(READY)
	@$(PYTHON) compare.py --plots $(ARGS)

test: $(READY)
	@$(PYTHON) -m pytest -q test_all.py $(ARGS)

# In environments of their own; VERSIONS reaches it through the environment.
test-versions:
	@$(PYTHON) versions.py $(ARGS)

clean:
	rm -rf .venv .versions plots __pycache__ .pytest_cache .hypothesis
