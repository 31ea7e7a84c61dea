"""Writes a JSONL file of any size from the rows of another: ``python3 large_file.py data/debian.jsonl 5e9 data/large.jsonl``.

Each row joins two random texts and keeps the label of the first, so hardly any two are equal. For measuring that the
trainer's memory does not grow with its data.
"""

import json
import random
import sys
from pathlib import Path


def main(source: Path, size: int, target: Path) -> None:
    """Write at least ``size`` bytes; prints rows and bytes."""
    rows = [json.loads(line) for line in source.open(encoding="utf-8")]
    draw = random.Random(0)
    written = count = 0
    with target.open("w", encoding="utf-8") as f:
        while written < size:
            one, other = draw.choice(rows), draw.choice(rows)
            line = json.dumps({"text": f"{one['text']} {other['text']}", "label": one["label"]}, ensure_ascii=False)
            written += len(line.encode()) + 1
            f.write(line + "\n")
            count += 1
    print(f"{count} rows, {written} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(float(sys.argv[2])), Path(sys.argv[3]))
