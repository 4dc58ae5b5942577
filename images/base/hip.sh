#!/bin/sh
# mmdebstrap customize hook of a toolchain; $1 is the new root. It lays out /opt/rocm as AMD's images do.
set -eu
root=$1

mkdir -p "$root/opt/rocm/bin"
# Not a link: it looks for its other half next to itself. The machine remains usable while it compiles.
printf '#!/bin/sh\nexec nice -n 19 /usr/bin/hipcc "$@"\n' >"$root/opt/rocm/bin/hipcc"
chmod 755 "$root/opt/rocm/bin/hipcc"
ln -s /usr/include "$root/opt/rocm/include"
ln -s /usr/lib/x86_64-linux-gnu "$root/opt/rocm/lib"
# The Python of the images, instead of that of this Debian release.
ln -sf python3.11 "$root/usr/bin/python3"
# Debian 13 has no hipBLASLt. torch's headers name one type of it.
if [ ! -e "$root/usr/include/hipblaslt/hipblaslt.h" ]; then
    mkdir -p "$root/usr/include/hipblaslt"
    printf '#pragma once\ntypedef void *hipblasLtHandle_t;\n' >"$root/usr/include/hipblaslt/hipblaslt.h"
fi
