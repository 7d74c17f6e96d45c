#!/usr/bin/env bash
# Installs what is missing and fine-tunes SmolLM2-135M-Instruct on conversations; further arguments go to the app:
#   ./scripts/sft.sh --epochs 1 --training.learning_rate 1e-4
#   ./scripts/sft.sh --resume last
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/install.sh
[[ " $* " == *" --config"* ]] || set -- --config apps/sft/smollm2_135m.yaml "$@"
exec .venv/bin/python -m apps.sft.main "$@"
