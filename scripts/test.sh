#!/usr/bin/env bash
# Installs what is missing, checks the code's form and runs the tests; further arguments go to pytest:
#   ./scripts/test.sh tests/unit -k collate
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/install.sh
if [ $# -eq 0 ]; then
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/pyright
fi
exec .venv/bin/python -m pytest "$@"
