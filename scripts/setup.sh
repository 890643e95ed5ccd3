#!/usr/bin/env bash
# Prepares the Python environment of every `make` job and prints its folder of programs, the only thing on stdout.
#
# Which environment: the active one (VIRTUAL_ENV, else CONDA_PREFIX) if torch is in it, and then torch is never changed;
# otherwise .venv of this checkout, made with the first suitable Python. PYTHON=... names another one.
# When: only if something that the environment is made from has changed (`key` below). Python sources are not part of
# it, for they are installed editable.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stop() {
    echo "torchrelay: $*" >&2
    exit 1
}

# The lower bounds stand in the manifests; they are read, so that there is no second copy to forget.
rust_wanted=$(sed -n 's/^rust-version = "\([0-9.]*\)".*/\1/p' Cargo.toml)
python_wanted=$(sed -n 's/^requires-python = ">=\([0-9.]*\)".*/\1/p' pyproject.toml)
torch_wanted=$(sed -n 's/^dependencies = .*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
maturin=$(sed -n 's/^requires = \["\(maturin[^"]*\)"\].*/\1/p' pyproject.toml)

# at_least 3.10 3.9.18 is false: the versions are compared number by number.
at_least() {
    local wanted=${1//./ } found=${2//./ } w f
    for w in $wanted; do
        f=${found%% *}
        found=${found#"$f"} found=${found# }
        ((10#${f:-0} > 10#$w)) && return 0
        ((10#${f:-0} < 10#$w)) && return 1
    done
    return 0
}

check_rust() {
    local found
    command -v cargo >/dev/null || stop "Rust $rust_wanted or newer is needed and there is no cargo; install it from https://rustup.rs and run this again."
    found=$(cargo --version 2>/dev/null | sed -n 's/^cargo \([0-9.]*\).*/\1/p') || true
    [ -n "$found" ] || stop "Rust $rust_wanted or newer is needed and 'cargo --version' fails; install it from https://rustup.rs and run this again."
    at_least "$rust_wanted" "$found" || stop "Rust $rust_wanted or newer is needed and cargo is $found; run 'rustup update stable' and run this again."
}

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

# The first suitable Python, `python3` before the others: it is the one that the user thinks of.
find_python() {
    local candidate version best=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python3.14 python}; do
        version=$(version_of "$candidate") || continue
        at_least "$python_wanted" "$version" && echo "$candidate" && return
        best=${best:-"$candidate is $version"}
    done
    stop "Python $python_wanted or newer is needed and ${best:-there is none}; install one, or name it with PYTHON=/path/to/python3 make ..."
}

has() { "$1" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$2') is None)" 2>/dev/null; }

find_environment() {
    local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} version python
    if [ -n "$active" ] && has "$active/bin/python" torch; then
        version=$(version_of "$active/bin/python")
        at_least "$python_wanted" "$version" || stop "Python $python_wanted or newer is needed and the active environment $active has $version; deactivate it and run this again."
        env=$active
        return
    fi
    env=$PWD/.venv
    if ! "$env/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        "$python" -c 'import ensurepip, venv' 2>/dev/null || stop "$python cannot make virtual environments; install its venv module (Debian and Ubuntu: apt install python3-venv) and run this again."
        echo "torchrelay: making the environment .venv with $python ($(version_of "$python"))" >&2
        "$python" -m venv --clear "$env" >&2
    fi
}

# Whatever the installed package is made from, and where: an environment can be lent to two checkouts in turn.
key() {
    {
        pwd
        "$env/bin/python" -V
        find Cargo.toml Cargo.lock pyproject.toml rust scripts/setup.sh -type f -print0 | LC_ALL=C sort -z | xargs -0 cksum
    } | cksum
}

pin_torch() {
    local version
    version=$("$env/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
    at_least "$torch_wanted" "${version%%[!0-9.]*}" || stop "torch $torch_wanted or newer is needed and the environment $env has $version; upgrade it there, or deactivate the environment and run this again."
    echo "torch==$version" >"$1"
}

install() {
    trap 'stop "the set-up failed; what is wrong stands above."' ERR
    constraint=$(mktemp)
    trap 'rm -f "$constraint"' EXIT
    if has "$env/bin/python" torch; then
        pin_torch "$constraint"
        echo "torchrelay: building and installing into $env" >&2
        export PIP_QUIET=1
    else
        echo "torchrelay: installing torch and the development tools into $env (several GB, once), then building" >&2
    fi
    export PIP_CONSTRAINT=$constraint PIP_DISABLE_PIP_VERSION_CHECK=1
    "$env/bin/python" -m pip --version >/dev/null 2>&1 || "$env/bin/python" -m ensurepip >/dev/null ||
        stop "the environment $env has no pip; install it there and run this again."
    "$env/bin/python" -m pip install "$maturin" >&2
    # maturin takes the environment from one variable and refuses two.
    env -u CONDA_PREFIX VIRTUAL_ENV="$env" PATH="$env/bin:$PATH" python -m maturin develop --release --extras dev >&2
}

check_rust
find_environment
stamp=$env/.torchrelay-$(pwd | cksum | cut -d ' ' -f 1)
wanted=$(key)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || ! ls python/torchrelay/_core.*.so >/dev/null 2>&1; then
    install
    echo "$wanted" >"$stamp"
fi
echo "$env/bin"
