#!/usr/bin/env bash
# Builds the sdist and, from it, the wheel; installs the wheel into an empty folder; runs the parity suite from
# it in another empty folder. Arguments go to the parity suite. `make wheel` sets up first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly python=$PWD/.venv/bin/python
scratch=$(mktemp -d)
readonly scratch
trap 'rm -rf "$scratch"' EXIT

mkdir "$scratch/site" "$scratch/empty"
rm -rf dist
"$python" -m build --no-isolation --outdir dist .
"$python" -m pip install --quiet --no-deps --target "$scratch/site" dist/*.whl

# PYTHONPATH comes before the editable install, and the ranks that the suite starts inherit it.
cd "$scratch/empty"
export PYTHONPATH=$scratch/site
"$python" - "$scratch/site" <<'PY'
import importlib, pathlib, sys

for name in ("hyper_parallel", "hyper_parallel_torch", "hyper_parallel_mindspore"):
    path = pathlib.Path(importlib.import_module(name).__file__)
    if pathlib.Path(sys.argv[1]).resolve() not in path.resolve().parents:
        sys.exit(f"wheel: {name} came from {path}, not from the wheel")
PY
"$python" -m hyper_parallel.parity --platforms torch mindspore --report report "$@"
