#!/usr/bin/env bash
# Installs what is missing and trains SmolLM2-135M-Instruct with GRPO; further arguments go to the app:
#   ./scripts/grpo.sh --steps 20 --grpo.n_samples 4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/install.sh
[[ " $* " == *" --config"* ]] || set -- --config apps/grpo/smollm2_135m.yaml "$@"
exec .venv/bin/python -m apps.grpo.main "$@"
