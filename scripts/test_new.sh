#!/usr/bin/env bash
# Makes a crate outside the workspace with `voltaic new`, builds it, trains it, and runs its command line.
#
# Not one of `cargo test`'s tests, because the build takes minutes. It shares target/ and the versions of
# Cargo.lock with the workspace, so that most of what it needs is there already.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

expect() { # text, file
    grep -qF -- "$1" "$2" || { printf 'test_new: no "%s" in:\n' "$1" >&2; cat "$2" >&2; exit 1; }
}

cd "$root"
# of the whole workspace, because cargo would compile voltaic again for what its part alone needs
cargo build --workspace --bin voltaic
cd "$work"
"$root/target/debug/voltaic" new circle >out
expect "cargo run --release -- fit --config recipe.yaml" out
cp "$root/Cargo.lock" circle/
cd circle

# your own terminal: neither the workspace's .cargo/config.toml nor a LIBTORCH of the caller's
env -u LIBTORCH CARGO_TARGET_DIR="$root/target" cargo build
circle="$root/target/debug/circle"
"$circle" models >out
expect Net out
expect Points out
expect "A perceptron with one hidden layer" out
expect "Points of a square" out
"$circle" fit --model=Net --help >out
expect "Width of the hidden layer" out
"$circle" fit --config recipe.yaml --trainer.max_epochs=2 --model.width=16 --trainer.enable_progress_bar=false >out
expect metrics.csv out
csv=$(sed -n 's/^metrics *//p' out)
expect val_acc "$csv"
# a debug program has optimized kernels
RUST_LOG=voltaic=debug "$circle" fit --config recipe.yaml --trainer.max_epochs=1 --trainer.enable_progress_bar=false >out 2>&1
expect "voltaic's kernels for the CPU are in use" out
if "$circle" fit --config recipe.yaml --model.widht=16 >out 2>&1; then
    echo "test_new: a misspelt key passed" >&2
    exit 1
fi
expect "did you mean" out
echo "test_new: all is well"
