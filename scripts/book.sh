#!/usr/bin/env bash
# Makes a site of the pages in target/book/html by mdBook (`cargo install mdbook`). Its contents are README's table of pages.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
book="${CARGO_TARGET_DIR:-$root/target}/book"
command -v mdbook >/dev/null || { echo "book: mdbook is not installed; run 'cargo install mdbook'" >&2; exit 1; }

cd "$root"
rm -rf "$book"
mkdir -p "$book/src"
# the pages, and what they link to, at the places where links look for it
links() { # page...
    for page in "$@"; do
        grep -o '](\.*[^):]*)' "$page" | sed 's/^](//; s/[#)].*//' | while read -r link; do
            [ -z "$link" ] || realpath --relative-to=. "$(dirname "$page")/$link"
        done || true # a page without links
    done
}
pages=(*.md docs/*.md docs/benchmarks/*.md docs/benchmarks/*/*.md)
{ printf '%s\n' "${pages[@]}"; links "${pages[@]}"; } | sort -u | while read -r file; do
    [ ! -f "$file" ] || cp --parents "$file" "$book/src"
done

{
    printf '# Summary\n\n[voltaic](README.md)\n\n'
    sed -n '/^## Pages$/,/^## Where/p' README.md | sed -n 's/^| \([^|]*\) | \(.*\[.*\) |$/\1\n\2/p' | while read -r title && read -r pages; do
        printf '# To %s\n\n' "$title"
        grep -o '\[[^]]*\]([^)]*)' <<<"$pages" | sed 's/^/- /'
        echo
    done
    printf '# Measured\n\n'
    for page in docs/benchmarks/[!R]*.md docs/benchmarks/*/*.md; do
        printf -- '- [%s](%s)\n' "$(sed -n '1s/^# //p' "$page")" "$page"
    done
    printf '\n# About the project\n\n- [Architecture](ARCHITECTURE.md)\n- [Contributing](CONTRIBUTING.md)\n- [Changelog](CHANGELOG.md)\n'
} >"$book/src/SUMMARY.md"
printf '[book]\ntitle = "voltaic"\n\n[build]\nbuild-dir = "html"\nuse-default-preprocessors = false\n\n[output.html]\nno-section-label = true\n' >"$book/book.toml"
mdbook build "$book"
echo "book: $book/html/index.html"
