"""Writes the four files of this folder: a part of MNIST with as many images of each digit.

Takes the first images of each digit in a shuffled order (Python's random.Random, seed 20240229), then puts the chosen
images back into the order that MNIST has them in. Files are compressed with zlib level 9 and without a time stamp, so
that the same MNIST gives the same files.

    python3 data/digits/make_subset.py data/cache/mnist
"""

import gzip
import random
import struct
import sys
from pathlib import Path

SEED = 20240229
PER_DIGIT = {"train": 1200, "t10k": 200}


def read(folder: Path, name: str) -> bytes:
    plain, packed = folder / name, folder / (name + ".gz")
    return plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())


def write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(content)


def main() -> None:
    source, target = Path(sys.argv[1]), Path(__file__).parent
    for part, per_digit in PER_DIGIT.items():
        images = read(source, f"{part}-images-idx3-ubyte")
        labels = read(source, f"{part}-labels-idx1-ubyte")
        magic, count, rows, columns = struct.unpack(">4I", images[:16])
        if magic != 2051 or len(images) != 16 + count * rows * columns or len(labels) != 8 + count:
            sys.exit(f"{source}: the {part} files are not those of MNIST")
        size, digits = rows * columns, labels[8:]
        order = list(range(count))
        random.Random(SEED).shuffle(order)
        chosen = sorted(i for digit in range(10) for i in [j for j in order if digits[j] == digit][:per_digit])
        write(
            target / f"{part}-images-idx3-ubyte.gz",
            struct.pack(">4I", magic, len(chosen), rows, columns)
            + b"".join(images[16 + i * size : 16 + (i + 1) * size] for i in chosen),
        )
        write(
            target / f"{part}-labels-idx1-ubyte.gz",
            struct.pack(">2I", 2049, len(chosen)) + bytes(digits[i] for i in chosen),
        )
        print(f"{part}: {len(chosen)} of {count} images")


if __name__ == "__main__":
    main()
