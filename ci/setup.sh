#!/usr/bin/env bash
# Makes .venv match pyproject.toml and ci/constraints.txt, and does nothing when it already does.
#
# pyproject.toml says what is needed, ci/constraints.txt which versions. The stamp holds a digest of both, of
# this script, and of this folder's path (an editable install points here). It is written last, so a setup
# that was interrupted leaves none. Such a setup may have left packages half unpacked, which pip would
# take for installed: the `unfinished` mark makes the next run start from an empty environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv
readonly stamp=$venv/.stamp
readonly unfinished=$venv/.unfinished
readonly extras="torch,mindspore,cli,demo,parity,test,dev"

export PIP_DISABLE_PIP_VERSION_CHECK=1

# MindSpore 2.10 has wheels for Python 3.10 to 3.12.
supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10 python}; do
        if supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: found no Python 3.10, 3.11 or 3.12 (tried: ${PYTHON:-python3 python3.12 python3.11 python3.10 python})." >&2
    echo "setup: name one with 'make PYTHON=/path/to/python ...'." >&2
    return 1
}

wanted_stamp() {
    "$venv/bin/python" - "$PWD" pyproject.toml ci/constraints.txt ci/setup.sh <<'PY'
import hashlib, pathlib, sys

digest = hashlib.sha256(f"{sys.version}\n{sys.argv[1]}\n".encode())
for name in sys.argv[2:]:
    digest.update(hashlib.sha256(pathlib.Path(name).read_bytes()).digest())
print(digest.hexdigest())
PY
}

create() {
    local python
    python=$(find_python)
    echo "setup: creating $venv with $("$python" --version 2>&1); the packages take a few minutes, once"
    rm -rf "$venv"
    # Some systems ship Python without ensurepip; their own pip then installs the first one.
    "$python" -m venv "$venv" >/dev/null 2>&1 || {
        rm -rf "$venv"
        "$python" -m venv --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install -qq pip
    }
}

install() {
    local pip=("$venv/bin/python" -m pip install -qq --constraint ci/constraints.txt)
    rm -f "$stamp"
    touch "$unfinished"
    "${pip[@]}" hatchling
    "${pip[@]}" --no-build-isolation --editable ".[$extras]"
    rm -f "$unfinished"
}

# Two gates that start together must not install into one environment at the same time.
if command -v flock >/dev/null; then
    exec 9>"$venv.lock"
    flock 9
fi

if ! supported "$venv/bin/python" || ! [[ -x $venv/bin/pip ]] || [[ -e $unfinished ]]; then
    create
fi
if [[ -f $stamp && $(<"$stamp") == "$(wanted_stamp)" ]]; then
    exit 0
fi
echo "setup: installing hyper-parallel[$extras] into $venv"
install
wanted_stamp >"$stamp.new"
mv "$stamp.new" "$stamp"
echo "setup: done"
