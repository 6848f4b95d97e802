#!/usr/bin/env bash
# Slurm for the tests in this folder, what tests/cluster makes their hosts with, and shellcheck for the templates, from Debian's packages. As root:
#
#   bash tests/slurm/install.sh
#
# It does nothing where all is there. Where it cannot install (no root, no apt, no network) it says so and ends with 1.
set -euo pipefail
packages=(slurm-wlm munge libpmix-dev shellcheck iproute2 nftables)
programs=(slurmctld slurmd munged shellcheck ip nft)

missing=()
for program in "${programs[@]}"; do
    command -v "$program" > /dev/null || missing+=("$program")
done
compgen -G "/usr/lib/*/libpmix.so" > /dev/null || missing+=(libpmix.so)
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "tests/slurm/install.sh: ${missing[*]} missing; this needs root and apt-get. Packages: ${packages[*]}" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
if ! { apt-get -qq update && apt-get -qq install -y "${packages[@]}"; } > "$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "tests/slurm/install.sh: apt-get could not install ${packages[*]}" >&2
    exit 1
fi
