#!/usr/bin/env bash
# Type-checks all Rust code of the workspace, tests and benches included, for aarch64 Linux, whose kernels take other branches
# than those of x86-64. C++ is not compiled: libtorch's headers here are those of this machine, and nothing is linked.
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
if ! [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ]; then
  echo "Rust's standard library for $target is not installed: run \`rustup target add $target\`" >&2
  exit 1
fi

# In place of a C++ compiler and of ar: writes the files that they are asked for, with nothing in them.
tools=$PWD/target/check-aarch64/tools
mkdir -p "$tools"
cat > "$tools/c++" <<'TOOL'
#!/usr/bin/env bash
while [ $# -gt 0 ]; do
  case $1 in
    -o) shift; : > "$1" ;;
    *.a) : > "$1" ;;
    -\?) exit 1 ;; # not one of Microsoft's
    -E) echo '"gcc"' ;; # the cc crate asks which family of compilers this is of
  esac
  shift
done
TOOL
chmod +x "$tools/c++"
for tool in CC CXX AR; do
  export "${tool}_${target//-/_}=$tools/c++"
done

# Files of their own, since a real cross compiler must not find empty objects in place of its own.
CARGO_TARGET_DIR=target/check-aarch64 RUSTFLAGS="-D warnings" \
  "${CARGO:-cargo}" check --workspace --all-targets --target "$target"
