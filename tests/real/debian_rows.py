"""Real text and labels that nobody here wrote: Debian's package descriptions, in English and Chinese, with their section as the class.

    python3 tests/real/debian_rows.py data/debian.jsonl

Needs apt-get and the machine's own package sources; changes nothing on the machine (its lists lie in a temporary folder). Standard library only.
About 60,000 rows: {"text": description, "label": section, "language": "en" or "zh"}.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


def apt(lists: Path, *words: str) -> str:
    """apt-get with its package lists in ``lists`` and descriptions in English and Chinese."""
    (lists / "partial").mkdir(exist_ok=True)
    options = [
        "-o",
        f"Dir::State::Lists={lists}",
        "-o",
        "Acquire::Languages=en,zh_CN",
        "-o",
        "APT::Sandbox::User=",
        "-qq",
    ]
    return subprocess.run(["apt-get", *options, *words], check=True, capture_output=True, text=True).stdout


def stanzas(path: str) -> Iterator[dict[str, str]]:
    """The records of one index, unpacked by apt's own helper; a field's continuation lines keep their line breaks."""
    text = subprocess.run(
        ["/usr/lib/apt/apt-helper", "cat-file", path], check=True, capture_output=True
    ).stdout.decode()
    for block in text.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line.startswith(" "):
                fields[name] += "\n" + line[1:]
            elif line:
                name, _, value = line.partition(": ")
                fields[name] = value
        if fields:
            yield fields


def prose(description: str) -> str:
    """A description as running text: its first line, then the rest, a single dot on a line being a paragraph's end."""
    first, _, rest = description.partition("\n")
    return " ".join([first, *(line.strip() for line in rest.splitlines() if line.strip() != ".")]).strip()


def rows() -> Iterator[dict[str, str]]:
    """Every description that a package of the machine's sources has, once."""
    with tempfile.TemporaryDirectory() as made:
        lists = Path(made)
        apt(lists, "update")
        files = [
            line.split(" ", 1)
            for line in apt(lists, "indextargets", "--format", "$(CREATED_BY) $(FILENAME)").splitlines()
        ]
        sections = {
            record["Description-md5"]: record["Section"].split("/")[-1]
            for kind, path in files
            if kind == "Packages" and Path(path).exists()
            for record in stanzas(path)
            if "Description-md5" in record and "Section" in record
        }
        seen: set[tuple[str, str]] = set()
        for kind, path in files:
            if kind != "Translations" or not Path(path).exists():
                continue
            for record in stanzas(path):
                key = record.get("Description-md5", "")
                for field, language in (("Description-en", "en"), ("Description-zh_CN", "zh")):
                    if field in record and key in sections and (key, language) not in seen:
                        seen.add((key, language))
                        yield {"text": prose(record[field]), "label": sections[key], "language": language}


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python3 tests/real/debian_rows.py FILE.jsonl", file=sys.stderr)
        return 2
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with open(target, "w", encoding="utf-8") as f:
        for row in rows():
            f.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    print(f"{target}: {count} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
