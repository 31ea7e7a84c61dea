"""Rows of text and labels as the files say them: nothing is guessed into a number, a date or nothing."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from app.errors import Fault

FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
}
SUGGESTED = ("utf-16", "gb18030", "big5", "shift_jis", "cp1252")
csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default, 131,072 characters, is shorter than a long document


class Row(NamedTuple):
    """One usable row. ``label`` is "" where no label was asked for. ``line`` counts from 1 (Parquet: rows)."""

    text: str
    label: str
    file: str
    line: int


@dataclass(frozen=True)
class Source:
    """Which columns to read from files of which form. ``label_column`` "" reads no label.

    ``empty_texts``: an empty text, and a blank line of a text file, is a row like any other (prediction owes every row an answer).
    """

    text_column: str
    label_column: str
    encoding: str
    delimiter: str
    on_bad_row: str
    empty_texts: bool = False


@dataclass
class Counts:
    """What a reader passed over: blank lines of text files, and rows skipped by ``--on-bad-row skip``."""

    blank: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)


class BadRow(Exception):
    """A row that cannot be used; the reader goes on behind it when told to skip."""


def form(path: str) -> str:
    """csv, jsonl, parquet or text, from the file's name; raises Fault for any other name."""
    suffixes = Path(path).suffixes
    last = suffixes[-1].lower() if suffixes else ""
    if last == ".gz" and len(suffixes) > 1:
        last = suffixes[-2].lower()
        if last == ".parquet":
            raise Fault(f"{path}: Parquet is compressed inside; unpack it first: gunzip {path}")
    if last not in FORMATS:
        raise Fault(
            f"{path}: the ending {last or 'is missing and'!r} is none of {', '.join(FORMATS)} (also with .gz); rename or convert the file."
        )
    return FORMATS[last]


def read(path: str, source: Source, counts: Counts) -> Iterator[Row]:
    """The rows of one file in its order; ``counts`` is updated as they go by.

    Raises Fault with file, line and advice for a missing or unreadable file, a wrong encoding, a missing or doubled column, a damaged
    file, and, unless bad rows are skipped, for the first row that cannot be used.
    """
    kind = form(path)
    if not Path(path).exists():
        raise Fault(f"{path}: no such file (looked from {Path.cwd()}). Check --train-file and --eval-file.")
    if Path(path).is_dir():
        raise Fault(f"{path} is a folder; name the files in it: --train-file {path}/*.csv")
    reader = {"csv": _csv, "jsonl": _jsonl, "parquet": _parquet, "text": _text}[kind]
    with _readable(path, source):
        for line, cells in reader(path, source, counts):
            try:
                if isinstance(cells, BadRow):
                    raise cells
                yield Row(
                    _text_of(cells[0], source), _label_of(cells[1], source) if source.label_column else "", path, line
                )
            except BadRow as bad:
                if source.on_bad_row == "stop":
                    raise Fault(f"{path}, line {line}: {bad}. Mend the row, or pass --on-bad-row skip.") from None
                counts.bad += 1
                if len(counts.examples) < 5:
                    counts.examples.append(f"{path}, line {line}: {bad}")


Cells = tuple[int, "tuple[Any, Any] | BadRow"]


def _text_of(value: Any, source: Source) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{source.text_column!r} is {json.dumps(value, default=str)[:60]}, not a text")
    if not value.strip() and not source.empty_texts:
        raise BadRow(f"{source.text_column!r} is empty")
    return value


def _label_of(value: Any, source: Source) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, str)) and str(value).strip():
        return str(value).strip()
    raise BadRow(
        f"{source.label_column!r} is {'empty' if value in ('', None) else json.dumps(value, default=str)[:60]}; "
        "a label is a string, a whole number or a boolean"
    )


@contextmanager
def _readable(path: str, source: Source) -> Iterator[None]:
    """Turn what the operating system, gzip, the codec and the CSV parser say into one sentence that names the file."""
    try:
        yield
    except UnicodeError as e:
        raise Fault(_encoding_advice(path, source.encoding, e)) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise Fault(f"{path} is damaged or not gzip at all ({e}); fetch or pack it again.") from None
    except PermissionError:
        raise Fault(f"{path} may not be read by this user; chmod a+r {path}") from None
    except OSError as e:
        raise Fault(f"{path} cannot be read: {e.strerror or e}.") from None


def _bytes(path: str) -> Any:
    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")


def _lines(path: str, source: Source, newline: str | None) -> io.TextIOWrapper:
    """Decoded text; a byte-order mark is dropped whatever the case and spelling of utf-8."""
    try:
        encoding = "utf-8-sig" if source.encoding.lower().replace("_", "-") in ("utf-8", "utf8") else source.encoding
        return io.TextIOWrapper(_bytes(path), encoding=encoding, errors="strict", newline=newline)  # type: ignore[arg-type]
    except LookupError:
        raise Fault(
            f"--encoding {source.encoding!r} is no encoding that Python knows; try one of utf-8, {', '.join(SUGGESTED)}."
        ) from None


def _encoding_advice(path: str, encoding: str, error: UnicodeError) -> str:
    """Where decoding failed, and an encoding that fits the first 4 MB, if one of the usual ones does."""
    with _bytes(path) as f:
        head = f.read(4 << 20)
    where = ""
    try:
        head.decode(encoding)
        where = "beyond its first 4 MB"
    except UnicodeDecodeError as e:
        where = (
            f"at line {head[: e.start].count(10) + 1}, byte {e.start} (0x{head[e.start]:02x})"
            if e.start < len(head)
            else "at its end"
        )
    except UnicodeError as e:
        where = f"({e})"
    candidates = ("utf-16",) if head[:2] in (b"\xff\xfe", b"\xfe\xff") else SUGGESTED[1:]
    for name in candidates:
        try:
            head[: len(head) - len(head) % 4].decode(name)
        except UnicodeDecodeError as e:
            if e.start < len(head) - 8:
                continue
        return f"{path} is not {encoding} {where}; it reads as {name}: pass --encoding {name}"
    return f"{path} is not {encoding} {where} ({error.__class__.__name__}), nor any of {', '.join(SUGGESTED)}; pass its encoding with --encoding."


def _csv(path: str, source: Source, counts: Counts) -> Iterator[Cells]:
    delimiter = source.delimiter or ("\t" if ".tsv" in [s.lower() for s in Path(path).suffixes] else ",")
    with _lines(path, source, newline="") as f:
        rows = csv.reader(f, delimiter=delimiter, strict=True)
        try:
            header = next(rows, None)
            if header is None:
                return
            wanted = [source.text_column] + ([source.label_column] if source.label_column else [])
            places = [_column(path, header, name, delimiter) for name in wanted]
            for row in rows:
                if not row:
                    counts.blank += 1
                elif len(row) != len(header):
                    yield (
                        rows.line_num,
                        BadRow(
                            f"{len(row)} fields where the header has {len(header)}; quote a text that holds {delimiter!r}, "
                            "use JSONL, or pass --delimiter"
                        ),
                    )
                else:
                    yield rows.line_num, (row[places[0]], row[places[1]] if len(places) > 1 else None)
        except csv.Error as e:
            what = "a quote opened before the end of the file is never closed" if "end of data" in str(e) else str(e)
            raise Fault(
                f"{path}, line {rows.line_num}: {what}. Double the quotes inside a text, or use JSONL."
            ) from None


def _column(path: str, header: list[str], name: str, delimiter: str) -> int:
    found = header.count(name)
    if found == 1:
        return header.index(name)
    if found > 1:
        raise Fault(f"{path} has {found} columns named {name!r}; rename all but one.")
    advice = "name the right ones with --text-column and --label-column"
    for other in ("\t", ";", ",", "|"):
        if other != delimiter and len(header) == 1 and name in header[0].split(other):
            advice = f"its columns are separated by {other!r}: pass --delimiter {other!r}"
    raise Fault(f"{path} has no column {name!r}; its columns are {', '.join(map(repr, header[:20]))}; {advice}.")


def _jsonl(path: str, source: Source, counts: Counts) -> Iterator[Cells]:
    with _lines(path, source, newline=None) as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                counts.blank += 1
                continue
            if number == 1 and line.lstrip().startswith("["):
                raise Fault(
                    f"{path} holds one JSON list, not one object a line; convert it: jq -c '.[]' {path} > rows.jsonl"
                )
            try:
                cells = json.loads(line, object_pairs_hook=_no_doubled_keys)
                if not isinstance(cells, dict):
                    raise BadRow(f"{line.strip()[:60]!r} is no JSON object")
                for name in filter(None, (source.text_column, source.label_column)):
                    if name not in cells:
                        raise BadRow(
                            f"no key {name!r}; its keys are {', '.join(map(repr, list(cells)[:20]))}; "
                            "name the right ones with --text-column and --label-column"
                        )
                yield number, (cells[source.text_column], cells.get(source.label_column))
            except (BadRow, json.JSONDecodeError, RecursionError) as e:
                yield number, e if isinstance(e, BadRow) else BadRow(f"not JSON: {e}")


def _no_doubled_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    cells = dict(pairs)
    if len(cells) != len(pairs):
        raise BadRow("a key stands twice in the object")
    return cells


def _text(path: str, source: Source, counts: Counts) -> Iterator[Cells]:
    if source.label_column:
        raise Fault(
            f"{path} is plain text and holds no labels; for --task classify give CSV, JSONL or Parquet, or pass --task mlm."
        )
    with _lines(path, source, newline=None) as f:
        for number, line in enumerate(f, 1):
            if line.strip() or source.empty_texts:
                yield number, (line.rstrip("\n"), None)
            else:
                counts.blank += 1


def _parquet(path: str, source: Source, counts: Counts) -> Iterator[Cells]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as e:
        raise Fault(f"{path} is no whole Parquet file ({str(e).splitlines()[0]}); write it again.") from None
    header = list(file.schema_arrow.names)
    wanted = [source.text_column] + ([source.label_column] if source.label_column else [])
    for name in wanted:
        _column(path, header, name, "")
    number = 0
    for batch in file.iter_batches(batch_size=4096, columns=wanted):
        columns = [batch.column(batch.schema.get_field_index(name)).to_pylist() for name in wanted]
        for cells in zip(*columns, strict=True):
            number += 1
            yield number, (cells[0], cells[1] if len(cells) > 1 else None)
