#!/usr/bin/env bash
# Installs Apptainer on Debian 12, which has no package of it. As root:
#
#   bash tests/slurm/install_apptainer.sh [FOLDER]     # /opt/apptainer, and a link to its program in /usr/local/bin
#
# Debian sid has a package. It asks for a newer libc because of two functions that read numbers, so it is unpacked into
# a folder with sid's libc beside it, and its two programs are told to take that one; the machine's own libc stays as it
# is. apt fetches both from lists of its own and checks Debian's signatures.
set -euo pipefail
prefix="$(realpath -m "${1:-/opt/apptainer}")"
export DEBIAN_FRONTEND=noninteractive

# The first two make and mount images, uidmap and the range below let root build as an ordinary user does.
apt-get -qq update
apt-get -qq install -y squashfs-tools squashfuse uidmap debootstrap patchelf
grep -q '^root:' /etc/subuid || usermod --add-subuids 100000-165535 root
grep -q '^root:' /etc/subgid || usermod --add-subgids 100000-165535 root

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main" \
    > "$scratch/sid.list"
sid=(-qq -o Dir::Etc::SourceList="$scratch/sid.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::Cache="$scratch/cache"
    -o Dir::State::Lists="$scratch/lists" -o Acquire::Languages=none -o APT::Sandbox::User=root)
apt-get "${sid[@]}" update
(cd "$scratch" && apt-get "${sid[@]}" download apptainer libc6)

rm -rf "$prefix"
dpkg-deb --extract "$scratch"/apptainer_*.deb "$prefix"
dpkg-deb --extract "$scratch"/libc6_*.deb "$prefix/libc6"
libraries="$prefix/libc6/usr/lib/x86_64-linux-gnu"
starter="$prefix/usr/lib/x86_64-linux-gnu/apptainer/bin/starter"
# RPATH, unlike RUNPATH, holds for the libraries of its libraries, which must not bring the other libc.
patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries" \
    "$prefix/usr/bin/apptainer" "$starter"
# A moved Apptainer looks for its settings beside its programs, each of the two for itself.
ln -s ../etc ../var "$prefix/usr/"
ln -s ../../etc ../../var "$prefix/usr/lib/"
ln -sf "$prefix/usr/bin/apptainer" /usr/local/bin/apptainer
apptainer --version
