#!/usr/bin/env bash
# Makes .venv with everything that serving, tests and linters need. Running it again costs nothing until
# pyproject.toml, constraints.txt or this script change. PYTHON=/path/to/python chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
STAMP=$VENV/.kvtide-setup
TORCH=$(sed -n 's/^torch==/torch==/p' constraints.txt)
CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer found; install one, or name it: make setup PYTHON=/path/to/python3.11"
}

# A compiler for the CPU kernels, Redis and certificates for its tier's tests, fio for the disk benchmark, curl for the
# command that `make serve` prints. Each Debian package has the name of its command.
TOOLS=(g++ redis-server openssl fio curl)

missing_tools() {
    local tool
    for tool in "${TOOLS[@]}"; do
        command -v "$tool" >/dev/null || echo "$tool"
    done
}

install_system_needs() {
    local missing=() sudo=()
    mapfile -t missing < <(missing_tools)
    [[ ! -x $VENV/bin/python ]] && ! "$1" -c 'import ensurepip' 2>/dev/null && missing+=(python3-venv)
    ((${#missing[@]})) || return 0
    if ! command -v apt-get >/dev/null; then
        say "missing: ${missing[*]}; install them with your system's package tool"
        return 0
    fi
    if ((EUID != 0)); then
        if ! sudo -n true 2>/dev/null; then
            say "missing: ${missing[*]}; run: sudo apt-get install ${missing[*]}"
            return 0
        fi
        sudo=(sudo -n)
    fi
    say "installing ${missing[*]}"
    ${sudo[@]+"${sudo[@]}"} apt-get update -qq >/dev/null || say "apt-get update failed; trying with the old lists"
    # RUNLEVEL=1 keeps Debian from starting a Redis of its own, which we neither need nor want.
    ${sudo[@]+"${sudo[@]}"} env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
        say "apt-get could not install ${missing[*]}; going on without"
}

# As constraints.txt writes it, whatever the build: torch==2.x.y. Any other version must be replaced here, or the
# installation of kvtide would do it, from PyPI.
installed_torch() {
    "$VENV/bin/python" -c 'from importlib.metadata import version as v; print("torch==" + v("torch").split("+")[0])' \
        2>/dev/null || true
}

# Without an NVIDIA GPU, PyPI's Linux build of torch would bring gigabytes of CUDA libraries.
install_torch() {
    local index=()
    if [[ $(installed_torch) == "$TORCH" ]]; then return; fi
    if [[ $(uname -s) == Linux ]] && ! nvidia-smi >/dev/null 2>&1 && ! plain_torch_is_for_cpu; then
        index=(--index-url "$CPU_INDEX")
    fi
    say "installing $TORCH ${index[*]:-}"
    "$VENV/bin/pip" install -qq ${index[@]+"${index[@]}"} "$TORCH"
}

# Asks pip what it would take, without taking it: a CPU build calls itself 2.x.y+cpu.
plain_torch_is_for_cpu() {
    "$VENV/bin/pip" install -qq --dry-run --no-deps --ignore-installed --report "$VENV/torch.json" "$TORCH" \
        >/dev/null 2>&1 || return 1
    "$VENV/bin/python" - "$VENV/torch.json" <<'PY'
import json, sys
with open(sys.argv[1]) as report:
    version = json.load(report)["install"][0]["metadata"]["version"]
sys.exit(not version.endswith("+cpu"))
PY
}

is_done() { [[ -f $STAMP && $(<"$STAMP") == "$wanted" ]]; }

main() {
    local python
    wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)
    if is_done && [[ -z $(missing_tools) ]]; then exit 0; fi
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    python=$(find_python)
    install_system_needs "$python"
    if is_done; then exit 0; fi
    if [[ ! -x $VENV/bin/pip ]]; then
        say "creating $VENV with $("$python" --version)"
        "$python" -m venv "$VENV" || die "cannot create $VENV; on Debian: sudo apt-get install python3-venv"
    fi
    install_torch
    say "installing kvtide and what it needs"
    "$VENV/bin/pip" install -qq -c constraints.txt -e '.[test,dev]'
    printf '%s' "$wanted" >"$STAMP"
    say "done; next: make serve model=demo, or make test"
}

main
