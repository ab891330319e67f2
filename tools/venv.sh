#!/usr/bin/env bash
# Makes .venv with everything that the demo, the tests and the checks need. Run by `make venv`.
# Usage: tools/venv.sh [DIRECTORY [CONSTRAINTS [WHEEL]]]      the interpreter: $PYTHON, else the first suitable one on PATH
# With WHEEL: an environment of that wheel and its dependencies only.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
constraints=${2:-constraints.txt}
wheel=${3:-}
# Without bytecode: compiling all that is installed takes a minute and more, and Python does so for each module that it
# imports.
pip_flags=(--quiet --quiet --disable-pip-version-check --no-input --no-compile)

suitable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        suitable "$PYTHON" && echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if suitable "$candidate"; then echo "$candidate"; return; fi
    done
}

# Without a GPU, a torch that brings gigabytes of CUDA libraries is a waste: take PyTorch's own index of CPU builds then,
# but only then, since where pip is set up to find a CPU build that index may not be reachable. If it is not, CUDA's has
# to do.
torch_source() {
    command -v nvidia-smi >/dev/null 2>&1 && return
    if "$venv/bin/pip" install "${pip_flags[@]}" --dry-run --ignore-installed --report - -c "$constraints" torch 2>/dev/null |
        grep -q '"name": "\(nvidia-\|cuda-\|triton\)'; then
        echo "--index-url=https://download.pytorch.org/whl/cpu"
    fi
}

if ! [ -x "$venv/bin/python" ]; then
    python=$(find_python)
    if [ -z "$python" ]; then
        echo "make venv: needs Python >= 3.11 with its venv module; found ${PYTHON:-none on PATH}." \
            "Install one (Debian: apt install python3-venv) or name it: make venv PYTHON=/path/to/python3" >&2
        exit 1
    fi
    echo "make venv: creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
    # Python 3.11 brings a pip that takes twice as long for the rest; it will do where an index has no other.
    "$venv/bin/pip" install "${pip_flags[@]}" -c "$constraints" --upgrade pip || true
fi

# torch first: resolved together with the rest, pip might choose another build of it.
if ! "$venv/bin/python" -c 'import importlib.metadata as m, sys; sys.exit(not m.version("torch").startswith("2."))' 2>/dev/null; then
    echo "make venv: installing torch"
    # shellcheck disable=SC2046  # no source means no argument
    "$venv/bin/pip" install "${pip_flags[@]}" -c "$constraints" torch $(torch_source) ||
        "$venv/bin/pip" install "${pip_flags[@]}" -c "$constraints" torch
fi
if [ -n "$wheel" ]; then
    "$venv/bin/pip" install "${pip_flags[@]}" -c "$constraints" "$wheel"
    exit
fi
echo "make venv: installing zeromesh and its other dependencies"
"$venv/bin/pip" install "${pip_flags[@]}" -c "$constraints" -e '.[dev]'
"$venv/bin/pip" install "${pip_flags[@]}" --no-deps -r tools/torchtitan.txt
