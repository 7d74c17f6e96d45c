#!/usr/bin/env bash
# Installs forge and its stack for AMD GPUs into .venv: install.sh with vLLM's ROCm build. Takes its variables too.
#   FORGE_ROCM=rocm722        the ROCm build to take; by default the one that vLLM's index has of the pinned version
#   FORGE_ROCM_INDEX=URL      where those wheels lie: the address that vLLM's installation page gives for ROCm
# vLLM's ROCm wheels exist for Python 3.12 only, bring their own torch and triton, and are not on PyPI.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { printf 'install_rocm: %s\n' "$*" >&2; exit 1; }

export FORGE_VARIANT=rocm FORGE_PYTHON=${FORGE_PYTHON:-python3.12}
index=${FORGE_ROCM_INDEX:-}
[ -n "$index" ] || fail "set FORGE_ROCM_INDEX to the index of vLLM's ROCm wheels (the address without a version):" \
    "https://docs.vllm.ai/en/latest/getting_started/installation/gpu names it"
version=$(sed -n 's/^ *gpu = \["vllm==\([0-9.]*\)".*/\1/p' pyproject.toml)
[ -n "$version" ] || fail "pyproject.toml names no version of vllm in its extra 'gpu'"

[ -e /dev/kfd ] || echo "install_rocm: note: this machine has no AMD GPU that ROCm can use (/dev/kfd is missing)"
"$FORGE_PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
    fail "vLLM's ROCm wheels need Python 3.12, and $FORGE_PYTHON is not: install it, or name it with FORGE_PYTHON"
if [ -x .venv/bin/python ] && ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
    fail ".venv holds another Python than 3.12: move it away and run this again"
fi

if [ -z "${FORGE_ROCM:-}" ]; then
    page=$("$FORGE_PYTHON" -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=30).read().decode())' \
        "$index/vllm/" 2>/dev/null) || fail "can't read $index/vllm/: is the network up? FORGE_ROCM_INDEX names another index"
    builds=$(grep -oE 'vllm-[0-9][0-9.]*(\+|%2B)rocm[0-9]+' <<<"$page" | sed 's/%2B/+/; s/^vllm-//' | sort -u || true)
    FORGE_ROCM=$(sed -n "s/^${version//./\\.}+//p" <<<"$builds" | tail -n 1)
    [ -n "$FORGE_ROCM" ] || fail "$index has no wheel of vllm $version (it has: $(paste -sd' ' <<<"$builds"))." \
        "Name a build that lies elsewhere with FORGE_ROCM and FORGE_ROCM_INDEX, or build vllm $version from source" \
        "in the image vllm/vllm-openai-rocm: https://docs.vllm.ai/en/latest/getting_started/installation/gpu"
fi

# The exact build as a constraint: no resolver can then fall back to the CUDA wheel of the same version on PyPI.
constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
echo "vllm==$version+$FORGE_ROCM" >"$constraint"
export UV_CONSTRAINT=$constraint UV_INDEX="$index/$version/$FORGE_ROCM"
echo "install_rocm: vllm $version+$FORGE_ROCM from $UV_INDEX"
./scripts/install.sh
