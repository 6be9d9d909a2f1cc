#!/usr/bin/env bash
# Prepares `.libtorch/`: what `cargo build` needs of libtorch.
#
# It is a folder of links, either into the PyTorch wheel, which pip fetches into `.libtorch-wheel/` once, or into
# the PyTorch that LIBTORCH points at (an unpacked libtorch, or the `torch` folder of a Python installation).
# Links rather than LIBTORCH itself, because a PyTorch with CUDA would otherwise be linked and loaded whole.
# Does nothing when all is there. VOLTAIC_LIBTORCH_DIR names another folder than the repository's for both.
set -euo pipefail

TORCH_VERSION=2.11.0
CUDA_PACKAGES=("nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cupti==13.0.*")
# Pythons that the wheel exists for; others fetch the one for FALLBACK_PYTHON, since only its libraries are used.
PYTHONS="3.10 3.11 3.12 3.13 3.14"
FALLBACK_PYTHON=3.11
NEEDED_KIB=$((3 * 1024 * 1024))

root=${VOLTAIC_LIBTORCH_DIR:-$(cd "$(dirname "$0")/.." && pwd)}
view="$root/.libtorch"
wheel="$root/.libtorch-wheel"

fail() { # what, remedy
    printf 'setup: %s\n   to fix it: %s\n' "$1" "$2" >&2
    exit 1
}

need() { # command, remedy
    command -v "$1" >/dev/null 2>&1 || fail "'$1' is not installed" "$2"
}

version_of() { # folder of a libtorch -> its version, nothing if unknown
    if [ -f "$1/build-version" ]; then
        head -n 1 "$1/build-version"
    elif [ -f "$1/version.py" ]; then
        sed -n "s/^__version__ = ['\"]\(.*\)['\"]/\1/p" "$1/version.py"
    fi
}

is_ready() { # the PyTorch asked for; nothing if any will do
    [ -e "$view/lib/libtorch_cpu.so" ] && [ -e "$view/include/ATen" ] && [ -f "$view/build-version" ] || return 1
    local version made_from=""
    read -r version <"$view/build-version" || return 1
    [ "${version%%+*}" = "$TORCH_VERSION" ] || return 1
    [ -z "$1" ] && return 0
    [ ! -f "$view/made-from" ] || read -r made_from <"$view/made-from"
    [ "$made_from" = "$1" ]
}

check_libtorch() { # folder, how to call it, remedy
    local found
    [ -d "$1" ] || fail "$2 is not a folder" "$3"
    found=$(version_of "$1")
    [ -n "$found" ] || fail "$2 holds no build-version or version.py, so its version is unknown" "$3"
    [ "${found%%+*}" = "$TORCH_VERSION" ] || fail "$2 is version $found, voltaic needs $TORCH_VERSION" "$3"
    [ -d "$1/include/ATen" ] || fail "$2 has no include/ATen" "$3"
    local lib
    for lib in libc10.so libtorch_cpu.so; do
        [ -e "$1/lib/$lib" ] || fail "$2 has no lib/$lib" "$3"
    done
}

write_view() { # folder of a libtorch, the same as a link in .libtorch has it, and as one in .libtorch/lib has it
    local torch=$1 link=$2 lib_link=$3 lib
    rm -rf "$view.new"
    mkdir -p "$view.new/lib"
    ln -s "$link/include" "$view.new/include"
    for lib in libc10.so libtorch_cpu.so; do
        ln -s "$lib_link/lib/$lib" "$view.new/lib/$lib"
    done
    for lib in "$torch"/lib/libgomp*.so*; do
        if [ -e "$lib" ]; then ln -s "$lib_link/lib/${lib##*/}" "$view.new/lib/${lib##*/}"; fi
    done
    # libtorch_cpu.so of a wheel with CUDA names these two although it runs without a GPU
    for lib in libcudart.so.13 libcupti.so.13; do
        if [ -e "$torch/../nvidia/cu13/lib/$lib" ]; then
            ln -s "$lib_link/../nvidia/cu13/lib/$lib" "$view.new/lib/$lib"
        fi
    done
    # torch-sys links -ltorch; this linker script makes that the CPU libraries only
    printf 'INPUT(-ltorch_cpu -lc10)\n' >"$view.new/lib/libtorch.so"
    version_of "$torch" >"$view.new/build-version"
    printf '%s\n' "$torch" >"$view.new/made-from"
    rm -rf "$view"
    mv "$view.new" "$view"
}

check_compiler() {
    $cxx -std=c++20 -fsyntax-only -x c++ - 2>/dev/null <<<'#include <concepts>' ||
        fail "'$cxx' does not compile C++20" "apt-get install g++ (version 11 or newer), or set CXX to a newer compiler"
}

check_disk() {
    local free
    free=$(df -Pk "$root" | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$NEEDED_KIB" ] || fail "$root has $((free / 1024)) MiB of free disk space, the download needs $((NEEDED_KIB / 1024))" \
        "free some space, or set LIBTORCH to an existing PyTorch $TORCH_VERSION"
}

choose_wheel() { # sets `arguments`: none if python3 itself is one that the wheel exists for
    local version glibc
    version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    arguments=()
    case " $PYTHONS " in *" $version "*) return ;; esac
    [ "${version%.*}" -eq 3 ] && [ "${version#*.}" -ge 8 ] ||
        fail "python3 is version $version, whose pip does not know today's wheels" "install Python 3.8 or newer, or set LIBTORCH to an existing PyTorch $TORCH_VERSION"
    arguments=(--ignore-requires-python --python-version "$FALLBACK_PYTHON" --implementation cp --platform manylinux2014_x86_64)
    for glibc in {17..28}; do arguments+=(--platform "manylinux_2_${glibc}_x86_64"); done
}

explain_pip() { # what pip said
    cat "$1" >&2
    if grep -q "No space left" "$1"; then
        fail "the disk filled up while pip installed torch==$TORCH_VERSION" \
            "free 3 GB, or set LIBTORCH to an existing PyTorch $TORCH_VERSION"
    elif grep -q "No matching distribution" "$1"; then
        fail "pip finds no torch==$TORCH_VERSION for this machine" \
            "check the network and pip's index settings (pip config list), or set LIBTORCH to an existing PyTorch $TORCH_VERSION"
    fi
    fail "pip could not install torch==$TORCH_VERSION" \
        "check the network, or set LIBTORCH to an existing PyTorch $TORCH_VERSION"
}

download() {
    need python3 "apt-get install python3 python3-pip"
    python3 -m pip --version >/dev/null 2>&1 || fail "python3 has no pip" "apt-get install python3-pip"
    [ "$(uname -m)" = x86_64 ] || fail "there is no tested wheel for $(uname -m)" "set LIBTORCH to a PyTorch $TORCH_VERSION of this machine"
    check_disk
    local arguments
    choose_wheel
    echo "setup: installing torch==$TORCH_VERSION with pip into $wheel (1.2 GB, once)"
    rm -rf "$wheel" "$wheel.new"
    mkdir -p "$wheel.new/tmp"
    trap 'rm -rf "$wheel.new"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    # TMPDIR: pip unpacks there before it moves, and /tmp may be small. The other two undo settings that make
    # sense for packages one imports, and that pip refuses together with --target.
    TMPDIR="$wheel.new/tmp" PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 \
        python3 -m pip install --disable-pip-version-check --no-input --no-deps --no-compile --only-binary=:all: \
        --target "$wheel.new/site" "${arguments[@]}" "torch==$TORCH_VERSION" "${CUDA_PACKAGES[@]}" \
        2>"$wheel.new/pip.log" || explain_pip "$wheel.new/pip.log"
    check_libtorch "$wheel.new/site/torch" "the torch that pip installed" "run this again"
    mv "$wheel.new/site" "$wheel"
}

cxx=${CXX:-c++}
need cargo "install rustup, then 'rustup default stable'"
need "${cxx%% *}" "apt-get install g++, or set CXX to a compiler that knows C++20"

given=${LIBTORCH:-}
if [ -n "$given" ]; then
    given=$(cd "$given" 2>/dev/null && pwd || printf '%s' "$given")
    # the view itself is nobody's PyTorch
    if [ "$given" -ef "$view" ]; then given=""; fi
fi
is_ready "$given" && exit 0

check_compiler
if [ -n "$given" ]; then
    check_libtorch "$given" "LIBTORCH=$LIBTORCH" \
        "point LIBTORCH at a PyTorch $TORCH_VERSION (pip install torch==$TORCH_VERSION), or unset it to download one"
    write_view "$given" "$given" "$given"
else
    [ -n "$(version_of "$wheel/torch")" ] || download
    check_libtorch "$wheel/torch" ".libtorch-wheel/torch" "rm -r .libtorch-wheel, then run this again"
    write_view "$wheel/torch" ../.libtorch-wheel/torch ../../.libtorch-wheel/torch
fi
echo "setup: libtorch $(version_of "$view") is ready in $view"
