#!/bin/bash
# First process of one virtual host: gives it a name, a file system view and shared memory of its own, then stays.
# Usage: host.sh FOLDER NAME, in new network, mount, UTS, IPC and process namespaces; SHARED_FOLDERS has what lies under
# /tmp and is the same on all hosts, separated by colons.
set -e
folder=$1 name=$2
hostname "$name"
mkdir -p "$folder/cgroup" "$folder/tmp"
mount --rbind /sys/fs/cgroup "$folder/cgroup"
mount -t sysfs sysfs /sys
mount --rbind "$folder/cgroup" /sys/fs/cgroup
mount --bind "$folder/boot_id" /proc/sys/kernel/random/boot_id
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/hostname" /etc/hostname
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs "$folder/tmp"
IFS=:
for each in $SHARED_FOLDERS; do
  mkdir -p "$folder/tmp/${each#/tmp/}"
  mount --bind "$each" "$folder/tmp/${each#/tmp/}"
done
unset IFS
mount --rbind "$folder/tmp" /tmp
ip link set lo up
echo ready
exec >/dev/null
trap 'exit 0' TERM
trap : CHLD
while :; do
  sleep 3600 &
  wait $! || :
done
