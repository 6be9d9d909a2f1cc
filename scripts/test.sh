#!/usr/bin/env bash
# All tests, in parts of which two run side by side: most wait for processes that they start, or use one core.
#
# A part is what `cargo test` runs in one program: each folder of crates/voltaic/tests, unit tests, documentation, the other
# crates; and a crate of a user's own (test_new.sh). What a part prints is shown whole when it ends. The last lines say how
# each part ended and how long it took; if one failed, so does this. The other parts run all the same.
#
#   scripts/test.sh            all parts
#   scripts/test.sh it docs    these parts
#   LANES=1 scripts/test.sh    one after another
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}

# The longest first, but for `new`: it compiles, and what begins meanwhile waits for it. As the second one, it keeps none waiting.
all_parts() {
    echo it new zero hpu examples kernels units gaudi docs profiler
    for main in crates/voltaic/tests/*/main.rs; do
        name=$(basename "$(dirname "$main")")
        case $name in it | zero | hpu | examples | kernels | gaudi | profiler) ;; *) echo "$name" ;; esac
    done
    echo others
}

run_part() { # name
    case $1 in
    units) "$cargo" test -p voltaic --lib --bins ;;
    docs) "$cargo" test -p voltaic --doc ;;
    others) "$cargo" test --workspace --exclude voltaic ;;
    new) scripts/test_new.sh ;;
    *) "$cargo" test -p voltaic --test "$1" ;;
    esac
}

if [ "${1:-}" = --part ]; then # name, folder: called by what is below
    start=$SECONDS
    status=ok
    run_part "$2" >"$3/$2.out" 2>&1 </dev/null || status=FAILED
    exec 9>"$3/lock"
    flock 9
    printf '\n== %s\n' "$2"
    cat "$3/$2.out"
    printf '%-12s %-6s %4d s\n' "$2" "$status" $((SECONDS - start)) >>"$3/results"
    [ "$status" = ok ]
    exit
fi

read -ra parts <<<"$(if [ $# -gt 0 ]; then echo "$@"; else all_parts | tr '\n' ' '; fi)"
lanes=${LANES:-$(($(nproc) > 1 ? 2 : 1))}
# A thread that has nothing to do must not keep a core from the other part.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cargo" test --workspace --no-run
start=$SECONDS
printf 'testing, %d parts side by side: %s\n' "$lanes" "${parts[*]}"
failed=0
printf '%s\n' "${parts[@]}" | xargs -P "$lanes" -I{} scripts/test.sh --part {} "$work" || failed=1
printf '\n== parts, in %d s\n' $((SECONDS - start))
cat "$work/results"
if [ $failed = 1 ]; then
    echo "test: failed: $(awk '$2 != "ok" { print $1 }' "$work/results" | tr '\n' ' ')" >&2
    exit 1
fi
