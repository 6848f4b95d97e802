#!/usr/bin/env bash
# An MPI job under Flux, on CPUs or with one rank for each GPU.
#
#   python -m hpcdist submit --nodes 4 --ranks-per-node 32 train.py --epochs 3
#   flux batch job.flux train.py --epochs 3
#
# A line "# submit:" is what the command writes in place of the line before it, if the options that it names are given.
#
# ---- what a site edits: from here ----
# flux: --job-name=hpcdist
# submit: # flux: --job-name={name}
# flux: --nodes=2
# submit: # flux: --nodes={nodes}
# flux: --exclusive
# flux: --time-limit=30m
# submit: # flux: --time-limit={minutes}m
# flux: --output=hpcdist-{{id}}.out
# Flux does not read the next two, for the word before them:
# unused flux: --queue=NAME
# submit: # flux: --queue={queue}
# unused flux: --bank=NAME
# submit: # flux: --bank={account}
: "${HPCDIST_MODULES:=}"         # modules to load, separated by spaces, such as "openmpi/5.0.6 python/3.12"
: "${HPCDIST_PYTHON:=python}"    # the Python that has hpcdist, such as /path/to/venv/bin/python
: "${HPCDIST_MPI:=simple}"       # flux run's -o pmi=: simple for MPICH and Intel MPI, pmix for Open MPI
: "${HPCDIST_RANKS_PER_NODE:=4}"    # as many as a node has GPUs, if the script uses them
: "${HPCDIST_THREADS_PER_RANK:=1}"  # torch's threads in each rank
# ---- to here ----

set -euo pipefail
[[ $# -gt 0 ]] || { echo "usage: flux batch [OPTION...] job.flux SCRIPT [ARGUMENT...]" >&2; exit 2; }
if [[ -n "$HPCDIST_MODULES" ]]; then
    read -ra modules <<< "$HPCDIST_MODULES"
    set +u  # module is a function of the site's, which may read unset variables
    module load "${modules[@]}"
    set -u
fi

nodes="$(flux resource list -n -o '{nnodes}')"
job="$(flux getattr jobid)"
ranks="$((nodes * HPCDIST_RANKS_PER_NODE))"
echo "job $job on $nodes nodes, $ranks ranks, pmi=$HPCDIST_MPI, started $(date -Is) in $PWD"

export OMP_NUM_THREADS="$HPCDIST_THREADS_PER_RANK"
status=0
# The cores of a node are divided among its ranks; every rank sees all GPUs, as NCCL wants it for its way over NVLink.
flux run --nodes="$nodes" --tasks-per-node="$HPCDIST_RANKS_PER_NODE" --exclusive \
    -o cpu-affinity=per-task -o gpu-affinity=off -o pmi="$HPCDIST_MPI" -o exit-on-error \
    "$HPCDIST_PYTHON" -u "$@" || status=$?

echo "job $job ended $(date -Is) with status $status"
exit "$status"
