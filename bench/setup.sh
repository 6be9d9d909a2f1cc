#!/usr/bin/env bash
# Builds what `make bench` runs: voltaic's side, the peers in Rust, and a Python environment for the others.
# VOLTAIC_BENCH_PYTHON names a Python that has the packages, and saves the environment.
set -euo pipefail
cd "$(dirname "$0")"

PACKAGES=(torch==2.11.0 lightning==2.6.6 ninja==1.13.2 deepspeed==0.19.8 gguf==0.19.0 llama-cpp-python==0.3.36)
CARGO=${CARGO:-cargo}

fail() { # what, remedy
    printf 'bench: %s\n   to fix it: %s\n' "$1" "$2" >&2
    exit 1
}

python=${VOLTAIC_BENCH_PYTHON:-.venv/bin/python}
if [ -z "${VOLTAIC_BENCH_PYTHON:-}" ] && [ ! -e .venv/complete ]; then
    python3 -m venv --clear .venv ||
        fail "python3 cannot make an environment" "install python3-venv, or set VOLTAIC_BENCH_PYTHON"
    # deepspeed looks for the others while it is installed; it compiles its operators when it first trains
    .venv/bin/pip install --quiet "${PACKAGES[@]:0:3}" setuptools==65.5.0 wheel==0.48.0 packaging==26.3 &&
        DS_BUILD_OPS=0 .venv/bin/pip install --quiet --no-build-isolation "${PACKAGES[3]}" &&
        # llama.cpp for this processor, which takes ten minutes of one
        CMAKE_ARGS="-DGGML_NATIVE=on -DLLAVA_BUILD=off" .venv/bin/pip install --quiet --no-binary llama-cpp-python "${PACKAGES[@]:4}" ||
        fail "pip cannot install ${PACKAGES[*]} (4 GB)" "see pip's message, or set VOLTAIC_BENCH_PYTHON"
    touch .venv/complete
fi
for package in "${PACKAGES[@]}"; do
    found=$("$python" -c "from importlib.metadata import version; print(version('${package%%==*}'))") ||
        fail "$python has no ${package%%==*}" "install $package there, or unset VOLTAIC_BENCH_PYTHON"
    [ "${found%%+*}" = "${package##*==}" ] ||
        fail "$python has ${package%%==*} $found" "install $package there, or unset VOLTAIC_BENCH_PYTHON"
done
command -v "${CXX:-c++}" >/dev/null || fail "there is no C++ compiler, which deepspeed and llama.cpp need" "install one, or set CXX"

"$CARGO" build --release --package bench-runner --package bench-voltaic
(cd peers && "$CARGO" build --release)
