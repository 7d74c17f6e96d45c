#!/usr/bin/env bash
# Installs forge and its whole stack into .venv. Safe to run again: it does nothing when nothing is missing.
#   ./scripts/install.sh          picks CUDA where an NVIDIA driver is present, CPU elsewhere
#   FORGE_VARIANT=cpu|gpu|rocm    decides it by hand (for ROCm use install_rocm.sh);  FORGE_PYTHON=python3.12 names the interpreter
#   FORGE_EXTRAS=demo,dev,docs    what is installed beside forge itself (default: demo,dev)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { printf 'install: %s\n' "$*" >&2; exit 1; }

has_nvidia() { [ -e /proc/driver/nvidia/version ] || { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }; }
variant=${FORGE_VARIANT:-$(has_nvidia && echo gpu || echo cpu)}
extras=${FORGE_EXTRAS:-demo,dev}
case $variant in cpu | gpu | rocm) ;; *) fail "FORGE_VARIANT must be cpu, gpu or rocm, got '$variant'" ;; esac

# Nothing to do when what was installed last is what is asked for now.
stamp=.venv/.forge-installed
wanted=$(cat pyproject.toml scripts/install.sh scripts/requirements/*.txt | sha256sum | cut -c1-16)-$variant-$extras
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x .venv/bin/python ]; then exit 0; fi

python=${FORGE_PYTHON:-}
for candidate in python3.11 python3.12 python3.13 python3; do
    [ -n "$python" ] && break
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
        python=$candidate
    fi
done
[ -n "$python" ] || fail "no Python 3.11, 3.12 or 3.13 found: install one, or name it with FORGE_PYTHON"

if [ ! -x .venv/bin/python ]; then
    echo "install: creating .venv with $("$python" --version)"
    "$python" -m venv .venv || fail "could not create .venv: on Debian and Ubuntu install the package python3-venv"
fi
if [ ! -x .venv/bin/uv ]; then
    .venv/bin/python -m pip install --quiet uv || fail "could not install uv from PyPI: is the network up?"
fi

# uv does not read pip's settings: pass on where this machine keeps wheels of its own. Only folders that are
# there: find-links may hold several, separated by spaces.
links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$(.venv/bin/python -m pip config get global.find-links 2>/dev/null || true)}}
export UV_FIND_LINKS=${links// /,}
overrides=(--override scripts/requirements/overrides.txt --override "scripts/requirements/overrides-$variant.txt")
backend=()
# The CPU build of torch is not on PyPI. Where no folder of wheels has it, take PyTorch's own index.
if [ "$variant" = cpu ] &&
    ! .venv/bin/uv pip compile -q --no-deps --python .venv/bin/python - <<<"torch==2.13.0+cpu" >/dev/null 2>&1; then
    backend=(--torch-backend cpu)
fi

echo "install: forge[$variant,$extras] into .venv (about 3 minutes the first time)"
.venv/bin/uv pip install --compile-bytecode --python .venv/bin/python "${overrides[@]}" "${backend[@]}" -e ".[$variant,$extras]" ||
    fail "the packages could not be installed; the lines above say which one was not found"
# The kernel is compiled when it is first imported, and kept.
.venv/bin/python -c "import torch, forge, vllm, forge.weights._fingerprint_kernel" || fail "installed, but 'import torch, forge, vllm' fails: run .venv/bin/python -m forge.doctor"
echo "$wanted" >"$stamp"
echo "install: done"
