#!/usr/bin/env bash
# Fetches NVIDIA's libraries for the PyTorch wheel in .libtorch-wheel, with which accelerator=cuda works on a machine with a GPU:
# those that the wheel's own metadata names, 2.7 GB. Does nothing when they are there.
set -euo pipefail

NEEDED_KIB=$((6 * 1024 * 1024))

root=$(cd "$(dirname "$0")/.." && pwd)
wheel="$root/.libtorch-wheel"

fail() { # what, remedy
    printf 'setup: %s\n   to fix it: %s\n' "$1" "$2" >&2
    exit 1
}

"$root/scripts/setup.sh"
[ "$root/.libtorch/lib/libtorch_cpu.so" -ef "$wheel/torch/lib/libtorch_cpu.so" ] ||
    fail "the libtorch in use is not the one in .libtorch-wheel: $(readlink -f "$root/.libtorch/lib/libtorch_cpu.so")" \
        "install NVIDIA's libraries beside it (python3 -m pip install torch does), or unset LIBTORCH, remove .libtorch and run this again"
if [ -e "$wheel/nvidia/complete" ]; then
    echo "setup: NVIDIA's libraries are in .libtorch-wheel/nvidia"
    exit
fi
free=$(df -Pk "$root" | awk 'NR == 2 { print $4 }')
[ "$free" -ge "$NEEDED_KIB" ] || fail "$root has $((free / 1024)) MiB of free disk space, the download needs $((NEEDED_KIB / 1024))" \
    "free some space"

# Requires-Dist: nvidia-nccl-cu13==2.28.9; platform_system == "Linux"
mapfile -t packages < <(sed -nE 's/^Requires-Dist: *((nvidia|cuda-toolkit)[^;]*[^; ]) *(;.*)?$/\1/p' "$wheel"/torch-*.dist-info/METADATA)
[ "${#packages[@]}" -gt 0 ] || fail "the wheel in $wheel names no libraries of NVIDIA's" "remove $wheel and run this again"
echo "setup: installing ${packages[*]} with pip into .libtorch-wheel/nvidia (2.7 GB, once)"
new="$wheel/cuda.new"
rm -rf "$new"
mkdir -p "$new/tmp"
trap 'rm -rf "$new"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
TMPDIR="$new/tmp" PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 \
    python3 -m pip install --quiet --disable-pip-version-check --no-input --no-compile --only-binary=:all: \
    --target "$new/site" "${packages[@]}" ||
    fail "pip could not install them" "check the network, or set LIBTORCH to an existing PyTorch with CUDA and run 'make setup'"
touch "$new/site/nvidia/complete"
rm -rf "$wheel/nvidia.old"
mv "$wheel/nvidia" "$wheel/nvidia.old"
mv "$new/site/nvidia" "$wheel/nvidia"
rm -rf "$wheel/nvidia.old"
echo "setup: NVIDIA's libraries are in .libtorch-wheel/nvidia"
