#!/bin/sh
# mmdebstrap customize hook; $1 is the new root. It removes files that differ between machines (so that equal package
# versions give an equal tar) and files that a container never uses.
set -eu
root=$1

# The user of an image can write to its own folders and the temporary ones alone.
chmod 755 "$root/run/lock"

: >"$root/etc/machine-id"
rm -f "$root/etc/resolv.conf" "$root/etc/hostname" \
    "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old

chroot "$root" dpkg-query --show --showformat '${Package}=${Version}\n' >"$root/etc/rlhf-stack-base.txt"
