#!/usr/bin/env bash
# Runs the whole test suite in one pytest command; arguments go to pytest. `make test` sets up first.
# A backend named here that is missing is a failure, not a skip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export HYPER_PARALLEL_TEST_BACKENDS=${HYPER_PARALLEL_TEST_BACKENDS:-torch,mindspore}
exec .venv/bin/python -m pytest tests "$@"
