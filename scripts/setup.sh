#!/usr/bin/env bash
# Prepares `.libtorch/`: what `cargo build` needs of libtorch, taken from the PyTorch wheel.
#
# Does nothing when it is there already. `LIBTORCH=/path` pointing at a PyTorch of the right version
# (an unpacked libtorch, or the `torch` folder of a Python installation) wins over the download.
set -euo pipefail

TORCH_VERSION=2.11.0
CUDA_PACKAGES=("nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cupti==13.0.*")

root=$(cd "$(dirname "$0")/.." && pwd)
view="$root/.libtorch"

fail() { # what, remedy
    printf 'setup: %s\n   to mend it: %s\n' "$1" "$2" >&2
    exit 1
}

need() { # command, Debian package
    command -v "$1" >/dev/null 2>&1 || fail "'$1' is not installed" "apt-get install $2"
}

version_of() { # folder of a libtorch -> its version, nothing if unknown
    if [ -f "$1/build-version" ]; then head -n 1 "$1/build-version"
    elif [ -f "$1/version.py" ]; then sed -n "s/^__version__ = '\(.*\)'/\1/p" "$1/version.py"
    fi
}

check_version() { # folder
    local found
    found=$(version_of "$1")
    [ -n "$found" ] || fail "LIBTORCH=$1 holds no build-version or version.py, so its version is unknown" \
        "point LIBTORCH at PyTorch $TORCH_VERSION, or unset it and run 'make setup'"
    [ "${found%%+*}" = "$TORCH_VERSION" ] || fail "LIBTORCH=$1 is version $found, voltaic needs $TORCH_VERSION" \
        "pip install torch==$TORCH_VERSION, or unset LIBTORCH and run 'make setup'"
    [ -d "$1/include/ATen" ] || fail "LIBTORCH=$1 has no include/ATen" "use a PyTorch that ships its C++ headers"
}

write_view() { # site-packages folder holding torch/ and nvidia/
    local site=$1 torch="$1/torch" lib
    rm -rf "$view.new"
    mkdir -p "$view.new/lib"
    ln -s "$torch/include" "$view.new/include"
    for lib in libc10.so libtorch_cpu.so libgomp.so.1; do
        [ -e "$torch/lib/$lib" ] && ln -s "$torch/lib/$lib" "$view.new/lib/$lib"
    done
    # libtorch_cpu.so of the CUDA wheel names these two although it runs without a GPU
    for lib in libcudart.so.13 libcupti.so.13; do
        [ -e "$site/nvidia/cu13/lib/$lib" ] && ln -s "$site/nvidia/cu13/lib/$lib" "$view.new/lib/$lib"
    done
    # torch-sys links -ltorch; this linker script makes that the CPU libraries only
    printf 'INPUT(-ltorch_cpu -lc10)\n' >"$view.new/lib/libtorch.so"
    version_of "$torch" >"$view.new/build-version"
    rm -rf "$view"
    mv "$view.new" "$view"
}

need cargo "rustup, then 'rustup default stable'"
need c++ g++
need python3 "python3 python3-pip"

if [ -n "${LIBTORCH:-}" ] && [ "$LIBTORCH" != "$view" ]; then
    check_version "$LIBTORCH"
    echo "setup: using LIBTORCH=$LIBTORCH ($(version_of "$LIBTORCH"))"
    exit 0
fi

if [ -e "$view/lib/libtorch_cpu.so" ] && [ -e "$view/include/ATen" ]; then
    check_version "$view"
    exit 0
fi

python3 -m pip --version >/dev/null 2>&1 || fail "python3 has no pip" "apt-get install python3-pip"
wheel="$root/.libtorch-wheel"
if [ "$(version_of "$wheel/torch")" ]; then # an earlier download
    write_view "$wheel"
    check_version "$view"
    exit 0
fi
echo "setup: installing torch==$TORCH_VERSION with pip into .libtorch-wheel (about 1.2 GB, once)"
rm -rf "$wheel"
python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$wheel" \
    "torch==$TORCH_VERSION" "${CUDA_PACKAGES[@]}" ||
    fail "pip could not install torch==$TORCH_VERSION" \
        "check the network and free disk space (3 GB), or set LIBTORCH to an existing PyTorch $TORCH_VERSION"
write_view "$wheel"
check_version "$view"
echo "setup: libtorch $(version_of "$view") is ready in .libtorch"
