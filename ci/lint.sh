#!/usr/bin/env bash
# Runs every static check, also after one has failed, and fails if any did. `make lint` sets up first.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly python=.venv/bin/python
failed=()

check() {
    local name=$1
    shift
    echo "lint: $name"
    "$@" || failed+=("$name")
}

check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
check "mypy" "$python" -m mypy
check "import contracts" .venv/bin/lint-imports --no-logo

if ((${#failed[@]})); then
    printf 'lint: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "lint: clean"
