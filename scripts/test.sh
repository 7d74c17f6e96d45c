#!/usr/bin/env bash
# Installs what is missing, checks the code's form and runs all tests, two files at a time (most tests start
# processes of their own). With arguments it only runs pytest, with these:
#   ./scripts/test.sh tests/unit -k collate
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/install.sh
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import forge: compiled once
if [ $# -eq 0 ]; then
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/pyright
    # those that take minutes come first, in this order
    set -- -n 2 --dist loadfile --no-loadscope-reorder tests/integration tests/unit
fi
exec .venv/bin/python -m pytest "$@"
