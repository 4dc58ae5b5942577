#!/usr/bin/env bash
# Runs nox in the project's own environment, which it makes first: bash scripts/nox.sh -s demo
#
# The environment is .nox/host. The user's configured pip installs scripts/requirements.txt into it, with hashes. It
# is rebuilt after a change of that lock, after an upgrade or removal of its Python, and after an interrupted
# attempt: the stamp is written last.
#
# Root is for set-up alone: in the checkout of another user, root installs what is missing, and everything else runs
# as that user, who may use Docker for this run.
set -euo pipefail
umask 022 # containers of other users read what is made here

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
environment=$root/.nox/host
lock=$root/scripts/requirements.txt

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

# Users of other ids read the tests in the images.
if command -v find >/dev/null && [ -z "$(find "$root/scripts" -maxdepth 0 -perm -005)" ]; then
    fail "other users cannot read this checkout, as after a clone under umask 077: run chmod -R go+rX $root"
fi

# Prints a Python that is new enough and can make an environment with pip, or nothing. Never one inside an
# environment, which may be the one to be rebuilt.
find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if "${as_user[@]}" "$candidate" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' 2>/dev/null &&
            "${as_user[@]}" "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
                2>/dev/null; then
            "${as_user[@]}" bash -c 'command -v "$1"' - "$candidate"
            return
        fi
    done
}

install_python() {
    local instruction='Python 3.11 or newer with venv is missing: run sudo apt-get install --yes python3 python3-venv'
    local as_root=()
    command -v apt-get >/dev/null || fail "Python 3.11 or newer with venv is missing: install it"
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null || fail "$instruction"
        as_root=(sudo -n)
    fi
    echo "installing from this system's packages, once: python3 python3-venv" >&2
    quietly apt-get --yes update || fail "apt-get update failed; $instruction"
    quietly env DEBIAN_FRONTEND=noninteractive apt-get --yes install --no-install-recommends python3 python3-venv ||
        fail "$instruction"
}

# Runs a command as root, through the caller's as_root; prints its output only if it fails.
quietly() {
    local output
    if ! output=$("${as_root[@]}" "$@" 2>&1 </dev/null); then
        printf '%s\n' "$output" | tail -n 5 >&2
        return 1
    fi
}

as_user=()
if [ "$(id -u)" -eq 0 ] && entry=$(getent passwd "$(stat --format %u "$root")"); then
    IFS=: read -r name _ user group _ home _ <<<"$entry"
    if [ "$user" -ne 0 ]; then
        # What root made here before:
        find "$root" -xdev -uid 0 \( -type d -o -links 1 \) -exec chown --no-dereference "$user:$group" {} +
        as_user=(setpriv --reuid "$user" --regid "$group" --init-groups)
        as_user+=(env "HOME=$home" "USER=$name" "LOGNAME=$name")
    fi
fi

"${as_user[@]}" mkdir -p "$root/.nox" || fail "cannot write into $root"
exec 9<"$root/.nox"
if command -v flock >/dev/null; then
    flock 9
fi
stamp=$(sha256sum <"$lock")
if [ "$(cat "$environment/stamp" 2>/dev/null)" != "$stamp" ] ||
    ! "$environment/bin/python" -c 'import nox' 2>/dev/null; then
    python=$(find_python)
    if [ -z "$python" ]; then
        install_python
        python=$(find_python)
        [ -n "$python" ] || fail "this system's Python is older than 3.11: install Python 3.11 or newer with venv"
    fi
    echo "making the host's environment (.nox/host)" >&2
    "${as_user[@]}" rm -rf "$environment"
    "${as_user[@]}" "$python" -m venv "$environment" || fail "python3 -m venv failed: see the lines above"
    "${as_user[@]}" "$environment/bin/python" -m pip install -qq --disable-pip-version-check --no-input --no-deps \
        --require-hashes --only-binary :all: --requirement "$lock" ||
        fail "the host's tools could not be installed: check the network and \`pip config list\`; then run this again"
    "${as_user[@]}" bash -c 'printf %s "$1" >"$2"' - "$stamp" "$environment/stamp"
fi
exec 9>&-

cd "$root"
if [ ${#as_user[@]} -gt 0 ]; then
    echo "root sets up this machine; everything else runs as $name" >&2
    PYTHONDONTWRITEBYTECODE=1 "$environment/bin/python" -m scripts docker ensure --user
    groups=$(id -G "$name"),$(stat --format %g /var/run/docker.sock 2>/dev/null || echo "$group")
    as_user=("${as_user[@]/--init-groups/--groups=${groups// /,}}")
fi
PATH=$environment/bin:$PATH exec "${as_user[@]}" "$environment/bin/python" -m nox "$@"
