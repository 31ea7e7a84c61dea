"""What the file says is what the reader gives, or a fault that names file, line and advice."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import Fault
from app.train.readers import Counts, Row, Source, read

LABELLED = Source("text", "label", "utf-8", "", "stop")
UNLABELLED = Source("text", "", "utf-8", "", "stop")
texts = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), min_size=1).filter(
    lambda t: t.strip()
)
labels = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1).filter(lambda t: t.strip())
anywhere = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def all_rows(path: Path, source: Source = LABELLED) -> list[Row]:
    return list(read(str(path), source, Counts()))


def fault(path: Path, source: Source = LABELLED) -> str:
    with pytest.raises(Fault) as caught:
        all_rows(path, source)
    assert caught.value.code == 2
    return str(caught.value)


@anywhere
@given(st.lists(st.tuples(texts, labels), min_size=1))
def test_csv_gives_back_what_was_written(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    path = tmp_path / "a.csv"
    with open(path, "w", newline="", encoding="utf-8") as f:
        csv.writer(f, quoting=csv.QUOTE_ALL).writerows([("text", "label"), *pairs])
    assert [(r.text, r.label) for r in all_rows(path)] == [(t, lab.strip()) for t, lab in pairs]


@anywhere
@given(st.lists(st.tuples(texts, st.one_of(labels, st.integers(), st.booleans())), min_size=1))
def test_jsonl_gives_back_what_was_written(tmp_path: Path, pairs: list[tuple[str, object]]) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": t, "label": lab}, ensure_ascii=False) + "\n" for t, lab in pairs)
    wanted = [
        (t, {True: "true", False: "false"}[lab] if isinstance(lab, bool) else str(lab).strip()) for t, lab in pairs
    ]
    assert [(r.text, r.label) for r in all_rows(path)] == wanted


@anywhere
@given(st.lists(st.tuples(texts, st.integers(-(2**40), 2**40)), min_size=1))
def test_parquet_gives_back_what_was_written(tmp_path: Path, pairs: list[tuple[str, int]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": [lab for _, lab in pairs], "text": [t for t, _ in pairs]}), path)
    assert [(r.text, r.label) for r in all_rows(path)] == [(t, str(lab)) for t, lab in pairs]


@anywhere
@given(
    st.lists(
        st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\r\n\x00"), min_size=1).filter(
            lambda t: t.strip()
        ),
        min_size=1,
    )
)
def test_text_has_as_many_rows_as_lines(tmp_path: Path, lines: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\r\n".join(lines).encode())
    assert [r.text for r in all_rows(path, UNLABELLED)] == [lines[0].removeprefix("\ufeff"), *lines[1:]] or not lines[
        0
    ].strip("\ufeff")


@pytest.mark.parametrize("value", ["1e5", "007", "NA", "null", "nan", "2024-01-01", "TRUE", "1,5"])
def test_no_value_is_guessed(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'text,label\n"{value}","{value}"\n')
    assert all_rows(path)[0][:2] == (value, value)


def test_byte_order_mark_and_line_separators(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\u2029still one\ntwo\r\nthree\rfour".encode())
    assert [r.text for r in all_rows(path, UNLABELLED)] == ["one\u2029still one", "two", "three", "four"]
    table = tmp_path / "b.csv"
    table.write_bytes("\ufefftext,label\na,b\n".encode())
    assert all_rows(table) == [Row("a", "b", str(table), 2)]


def test_newlines_in_a_field_and_a_field_longer_than_the_csv_module_allows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    long = "x" * 200_000
    path.write_text(f'text,label\n"one\ntwo",a\n"{long}",b\n')
    assert [r.text for r in all_rows(path)] == ["one\ntwo", long]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"text,label\n\xd6\xd0\xce\xc4,a\n", "--encoding gb18030"),
        ("a.txt", "中文文本".encode("gb18030"), "--encoding gb18030"),
        ("a.jsonl", "中文".encode("utf-16"), "--encoding utf-16"),
        ("a.csv", b"text,label\n\xd6\xd0\xce\xc4,a\n", "line 2, byte 11"),
        ("a.csv", b'text,label\n"never closed,a\nb,c\n', "never closed"),
        ("a.csv", b"text,label\none, two,a\n", "line 2: 3 fields where the header has 2"),
        ("a.csv", b"text;label\none;a\n", "--delimiter ';'"),
        ("a.csv", b"a,b\n1,2\n", "no column 'text'; its columns are 'a', 'b'"),
        ("a.csv", b"text,text,label\n1,2,3\n", "2 columns named 'text'"),
        ("a.csv", b"text,label\n ,a\n", "line 2: 'text' is empty"),
        ("a.csv", b"text,label\nx,\n", "line 2: 'label' is empty"),
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": "a"\n', "line 2: not JSON"),
        ("a.jsonl", b'{"text": 5, "label": 1}\n', "'text' is 5, not a text"),
        ("a.jsonl", b'{"text": "a", "label": 1.5}\n', "'label' is 1.5"),
        ("a.jsonl", b'{"text": "a", "label": null}\n', "'label' is empty"),
        ("a.jsonl", b'{"text": "a", "text": "b", "label": 1}\n', "a key stands twice"),
        ("a.jsonl", b'[{"text": "a"}]\n', "one JSON list"),
        ("a.jsonl", b'{"body": "a", "label": 1}\n', "no key 'text'; its keys are 'body', 'label'"),
        ("a.jsonl.gz", b"no gzip", "damaged or not gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a", "label": 1}\n' * 500)[:-20], "damaged or not gzip"),
        ("a.parquet", b"PAR1 but no more", "no whole Parquet file"),
        ("a.docx", b"", "the ending '.docx' is none of"),
        ("a", b"", "is missing"),
    ],
)
def test_faults_name_file_line_and_advice(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    source = UNLABELLED if name.endswith(".txt") else LABELLED
    sentence = fault(path, source)
    assert said in sentence
    assert name in sentence


def test_plain_text_has_no_labels(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x\n")
    assert "--task mlm" in fault(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert "no such file" in fault(tmp_path / "none.csv")
    (tmp_path / "d.csv").mkdir()
    assert "is a folder" in fault(tmp_path / "d.csv")


def test_an_unknown_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,b\n")
    assert "'klingon'" in fault(path, Source("text", "label", "klingon", "", "stop"))


def test_bad_rows_are_skipped_and_counted_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "label": 1}\nrubbish\n\n{"text": "", "label": 1}\n{"text": "b", "label": 2}\n')
    counts = Counts()
    rows = list(read(str(path), Source("text", "label", "utf-8", "", "skip"), counts))
    assert [(r.text, r.line) for r in rows] == [("a", 1), ("b", 5)]
    assert (counts.bad, counts.blank) == (2, 1)
    assert "line 2" in counts.examples[0]
