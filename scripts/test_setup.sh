#!/usr/bin/env bash
# Tests scripts/setup.sh without a network: pip, df and the compiler are stand-ins in a folder of their own.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
unset LIBTORCH CXX

# What the real machine must give; everything else is a stand-in.
TOOLS="bash sh cat grep sed head awk dirname mkdir mktemp ln mv rm sleep ls touch find readlink"

# A fresh repository in $work/repo and stand-ins in $work/bin.
fresh() {
    rm -rf "$work/repo" "$work/bin" "$work/pip.calls" "$work/torch"
    mkdir -p "$work/repo/scripts" "$work/bin"
    cp "$here/setup.sh" "$here/setup_cuda.sh" "$work/repo/scripts/"
    local tool
    for tool in $TOOLS; do ln -s "$(command -v "$tool")" "$work/bin/$tool"; done
    stand_in cargo 'exit 0'
    stand_in c++ 'exit 0'
    stand_in uname 'echo x86_64'
    stand_in df 'printf "Filesystem 1024-blocks Used Available Capacity Mounted\n/dev/x 9 9 %s 9%% /\n" "${FREE_KIB:-99999999}"'
    stand_in python3 "$FAKE_PYTHON"
}

stand_in() { # name, body
    rm -f "$work/bin/$1"
    printf '#!/usr/bin/env bash\n%s\n' "$2" >"$work/bin/$1"
    chmod +x "$work/bin/$1"
}

# `python3 -c ...` prints PYTHON; `python3 -m pip install --target DIR` makes a tiny PyTorch in DIR.
FAKE_PYTHON='
make_torch() {
    mkdir -p "$1/torch/include/ATen" "$1/torch/lib" "$1/nvidia/cu13/lib"
    touch "$1"/torch/lib/{libc10.so,libtorch_cpu.so,libtorch_cuda.so,libgomp.so.1}
    touch "$1"/nvidia/cu13/lib/{libcudart.so.13,libcupti.so.13}
    printf "__version__ = '"'%s'"'\n" "${TORCH:-2.11.0+cu130}" >"$1/torch/version.py"
    mkdir -p "$1/torch-2.11.0.dist-info"
    printf "Requires-Dist: sympy>=1.13\nRequires-Dist: cuda-toolkit[cublas,nvrtc]==13.0.2; system\n" >"$1/torch-2.11.0.dist-info/METADATA"
    printf "Requires-Dist: nvidia-nccl-cu13==2.28.9; system\n" >>"$1/torch-2.11.0.dist-info/METADATA"
}
case "$*" in
-c*) echo "${PYTHON:-3.11}" ;;
make_torch*) make_torch "$2" ;;
"-m pip --version") exit "${NO_PIP:-0}" ;;
"-m pip install "*)
    echo "$@" >>"$(dirname "$0")/../pip.calls"
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2/half"
    if [ -n "${PIP_SLEEP:-}" ]; then touch "$(dirname "$0")/../pip.started"; sleep "$PIP_SLEEP"; fi
    if [ -n "${PIP_ERROR:-}" ]; then echo "ERROR: $PIP_ERROR" >&2; exit 1; fi
    make_torch "$2" ;;
esac'

setup() { # [VAR=value ...]; output in $work/out, status in $status
    status=0
    env PATH="$work/bin" "$@" "$work/repo/scripts/setup.sh" >"$work/out" 2>&1 || status=$?
}

setup_cuda() { # the same
    status=0
    env PATH="$work/bin" "$@" "$work/repo/scripts/setup_cuda.sh" >"$work/out" 2>&1 || status=$?
}

check() { # what, condition...
    local what=$1
    shift
    if ! "$@"; then
        printf 'FAILED: %s\n  (%s)\n' "$what" "$*"
        sed 's/^/  | /' "$work/out"
        failures=$((failures + 1))
    fi
}

refuses() { # what the message must say; what the remedy must say
    check "ends with an error" [ "$status" -ne 0 ]
    check "says: $1" grep -qF -- "$1" "$work/out"
    check "says how to fix it: $2" grep -qF -- "$2" <(grep "to fix it:" "$work/out")
    check "leaves no view behind" [ ! -e "$work/repo/.libtorch" ]
    check "leaves no half download behind" [ ! -e "$work/repo/.libtorch-wheel.new" ]
}

succeeds() {
    check "ends well" [ "$status" -eq 0 ]
    check "headers are there" [ -d "$work/repo/.libtorch/include/ATen" ]
    local lib
    for lib in libc10.so libtorch_cpu.so libgomp.so.1 libcudart.so.13 libcupti.so.13; do
        check "$lib is there" [ -e "$work/repo/.libtorch/lib/$lib" ]
    done
    check "CUDA stays out" [ ! -e "$work/repo/.libtorch/lib/libtorch_cuda.so" ]
    check "the version is recorded" grep -q '^2\.11\.0' "$work/repo/.libtorch/build-version"
    check "no remains" [ ! -e "$work/repo/.libtorch-wheel.new" -a ! -e "$work/repo/.libtorch.new" ]
}

pip_calls() { # number
    local calls=0
    if [ -f "$work/pip.calls" ]; then calls=$(grep -c . "$work/pip.calls"); fi
    check "$1 calls of pip" [ "$calls" -eq "$1" ]
}

section() { printf '%s\n' "- $1"; fresh; }

section "downloads once; a second call is quick"
setup
succeeds
pip_calls 1
setup NO_PIP=1 # would fail if it looked for pip
succeeds
check "says nothing" [ ! -s "$work/out" ]
pip_calls 1
start=$(date +%s%N)
setup
check "takes less than 0.2 s" [ $((($(date +%s%N) - start) / 1000000)) -lt 200 ]

section "the repository can be moved"
setup
mv "$work/repo" "$work/moved"
check "links still lead somewhere" [ -e "$work/moved/.libtorch/lib/libtorch_cpu.so" ]
check "also to CUDA's run time" [ -e "$work/moved/.libtorch/lib/libcudart.so.13" ]
mv "$work/moved" "$work/repo"

section "a lost view is made again without pip"
setup
rm -rf "$work/repo/.libtorch"
setup
succeeds
pip_calls 1

section "a download that was cut off starts again"
PATH="$work/bin" PIP_SLEEP=30 "$work/repo/scripts/setup.sh" >"$work/out" 2>&1 &
child=$!
for _ in $(seq 100); do [ -e "$work/pip.started" ] && break; sleep 0.05; done
pkill -KILL -P "$child" || true # pip dies first, as on Ctrl-C in a terminal
kill -TERM "$child" 2>/dev/null || true
wait "$child" && check "the cut-off is an error" false
rm -f "$work/pip.started"
check "no wheel that looks whole" [ ! -e "$work/repo/.libtorch-wheel" ]
setup
succeeds

section "missing programs"
rm "$work/bin/c++"
setup
refuses "'c++' is not installed" "apt-get install g++"
fresh
rm "$work/bin/cargo"
setup
refuses "'cargo' is not installed" "rustup"
fresh
rm "$work/bin/python3"
setup
refuses "'python3' is not installed" "apt-get install python3 python3-pip"
fresh
setup NO_PIP=1
refuses "python3 has no pip" "apt-get install python3-pip"
fresh
stand_in c++ 'exit 1'
setup
refuses "'c++' does not compile C++20" "apt-get install g++"
fresh
setup CXX=clang++-99
refuses "'clang++-99' is not installed" "CXX"

section "failed downloads"
setup PIP_ERROR="Could not install packages due to an OSError: [Errno 28] No space left on device"
refuses "the disk filled up" "free 3 GB"
setup PIP_ERROR="No matching distribution found for torch==2.11.0"
refuses "pip finds no torch==2.11.0" "pip config list"
setup PIP_ERROR="Connection refused"
refuses "pip could not install torch==2.11.0" "check the network"
check "pip's own words are shown" grep -q "Connection refused" "$work/out"
setup FREE_KIB=1000000
refuses "976 MiB of free disk space" "free some space"
setup TORCH=2.12.0
refuses "the torch that pip installed is version 2.12.0" "run this again"
setup
succeeds

section "a Python without a wheel takes the libraries of another's"
for python in 3.8 3.15; do
    fresh
    setup PYTHON=$python
    succeeds
    check "asks for the wheel of 3.11" grep -q -- "--python-version 3.11 --implementation cp --platform manylinux" "$work/pip.calls"
done
fresh
setup PYTHON=3.14
check "3.14 has its own wheel" [ "$status" -eq 0 ]
check "asks for no other" grep -qvF -- --python-version "$work/pip.calls"

fresh
setup PYTHON=3.7
refuses "python3 is version 3.7" "install Python 3.8 or newer"

section "another kind of machine"
stand_in uname 'echo aarch64'
setup
refuses "there is no tested wheel for aarch64" "set LIBTORCH"

section "LIBTORCH wins over the download"
PATH="$work/bin" python3 make_torch "$work/torch"
setup LIBTORCH="$work/torch/torch"
succeeds
pip_calls 0
check "is what the links lead to" [ "$work/repo/.libtorch/include" -ef "$work/torch/torch/include" ]
setup
succeeds
pip_calls 0
mv "$work/torch" "$work/torch2"
mkdir "$work/torch"
mv "$work/torch2/torch" "$work/torch2/nvidia" "$work/torch/"
setup LIBTORCH="$work/repo/.libtorch"
check "the view as LIBTORCH is left alone" [ "$status" -eq 0 ]
rm -r "$work/torch" "$work/torch2"
setup
succeeds
pip_calls 1 # since the one that LIBTORCH named has gone
PATH="$work/bin" python3 make_torch "$work/torch"
setup LIBTORCH="$work/torch/torch"
check "replaces the download" [ "$work/repo/.libtorch/include" -ef "$work/torch/torch/include" ]

section "a LIBTORCH that will not do"
setup LIBTORCH="$work/nowhere"
refuses "LIBTORCH=$work/nowhere is not a folder" "unset it"
mkdir "$work/torch"
setup LIBTORCH="$work/torch"
refuses "LIBTORCH=$work/torch holds no build-version or version.py" "unset it"
echo 2.4.1+cpu >"$work/torch/build-version"
setup LIBTORCH="$work/torch"
refuses "LIBTORCH=$work/torch is version 2.4.1+cpu, voltaic needs 2.11.0" "torch==2.11.0"
echo 2.11.0+cpu >"$work/torch/build-version"
setup LIBTORCH="$work/torch"
refuses "LIBTORCH=$work/torch has no include/ATen" "unset it"
mkdir -p "$work/torch/include/ATen"
setup LIBTORCH="$work/torch"
refuses "LIBTORCH=$work/torch has no lib/libc10.so" "unset it"

section "NVIDIA's libraries are those that the wheel names, and come once"
setup_cuda
succeeds
pip_calls 2
check "names them" grep -qF "cuda-toolkit[cublas,nvrtc]==13.0.2 nvidia-nccl-cu13==2.28.9" "$work/pip.calls"
check "and no others" [ -z "$(grep sympy "$work/pip.calls")" ]
setup_cuda NO_PIP=1
succeeds
pip_calls 2

section "what goes wrong with NVIDIA's libraries leaves libtorch as it is"
setup
setup_cuda PIP_ERROR="no network"
check "ends with an error" [ "$status" -ne 0 ]
check "says how to fix it" grep -qF "check the network" "$work/out"
setup_cuda FREE_KIB=4000000
check "says how much it needs" grep -qF "the download needs 6144" "$work/out"
setup
succeeds
check "no remains" [ ! -e "$work/repo/.libtorch-wheel/cuda.new" ]
"$work/bin/python3" make_torch "$work/torch"
setup_cuda LIBTORCH="$work/torch/torch"
check "another PyTorch has its own" grep -qF "the libtorch in use is not the one in .libtorch-wheel" "$work/out"

if [ "$failures" -ne 0 ]; then
    echo "test_setup: $failures checks failed"
    exit 1
fi
echo "test_setup: all is well"
