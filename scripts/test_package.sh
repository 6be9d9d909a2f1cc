#!/usr/bin/env bash
# Packages the crates as `cargo publish` would, and trains a model in an empty folder with a crate that depends on them by version.
#
# Not one of `make test`'s tests, because all is compiled again. TARGET names a folder to compile in, to be kept.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
CRATES="voltaic-kernels voltaic-macros voltaic-build voltaic-sys voltaic"

cd "$root"
packages=()
for crate in $CRATES; do packages+=(--package "$crate"); done
cargo package --quiet --no-verify --allow-dirty --target-dir "$work/target" "${packages[@]}"
mkdir "$work/crates" "$work/my_net"
for file in "$work"/target/package/*.crate; do tar xzf "$file" -C "$work/crates"; done

cd "$work/my_net"
mkdir src
{
    printf '[package]\nname = "my_net"\nversion = "0.1.0"\nedition = "2024"\n\n'
    printf '[dependencies]\nvoltaic = "0.1"\n\n[build-dependencies]\nvoltaic-build = "0.1"\n\n[patch.crates-io]\n'
    # stands for the registry, which does not have them yet
    for folder in "$work"/crates/*; do
        name=$(basename "$folder")
        printf '%s = { path = "%s" }\n' "${name%-*}" "$folder"
    done
} >Cargo.toml
printf 'fn main() {\n    voltaic_build::link();\n}\n' >build.rs
# the program of README
sed -n '/^```no_run/,/^```/p' "$root/README.md" | sed '/^```/d' >src/main.rs
cp "$root/Cargo.lock" .

unset CARGO_TARGET_DIR
LIBTORCH="$root/.libtorch-wheel/torch" VOLTAIC_LIBTORCH_DIR="$work/cache" \
    cargo run --quiet --manifest-path "$work/crates"/voltaic-build-*/Cargo.toml
grep -q "value = \"$work/cache/.libtorch\"" .cargo/config.toml
export CARGO_TARGET_DIR="${TARGET:-$work/build}"
SECONDS=0
env -u LIBTORCH cargo build --release
echo "test_package: built in $SECONDS s"
"$CARGO_TARGET_DIR/release/my_net" >out 2>&1 || { cat out >&2; exit 1; }
grep -q "train_loss" lightning_logs/version_0/metrics.csv || { cat out >&2; exit 1; }
echo "test_package: all is well"
