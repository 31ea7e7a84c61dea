"""How a global batch is divided, and the worst micro-batch that is tried."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from runs import accelerate_file, metrics, write_rows

from app.errors import Fault
from app.train.batches import PackedShape
from app.train.fit import divide, longest


@pytest.mark.parametrize(
    ("sequences", "limit", "expected"), [(64, 64, (64, 1)), (64, 20, (16, 4)), (30, 7, (6, 5)), (7, 6, (1, 7))]
)
def test_the_fewest_rounds_that_fit(sequences: int, limit: int, expected: tuple[int, int]) -> None:
    assert divide(sequences, lambda batch: batch <= limit) == expected


def test_nothing_fits() -> None:
    with pytest.raises(Fault, match="not even one sequence") as caught:
        divide(8, lambda batch: False)
    assert caught.value.code == 3


def test_the_longest_sequences_fill_the_worst_micro_batch() -> None:
    lengths = np.array([5, 40, 7, 30, 40, 6])
    rows = np.array([0, 1, 2, 3, 5])
    assert longest(lengths, rows, None, 2, 0.0).tolist() == [1, 3]
    assert longest(lengths, rows, PackedShape(78, 9, 0, 40), 2, 0.0).tolist() == [1, 3, 2]
    assert longest(lengths, rows, PackedShape(78, 2, 0, 40), 2, 0.0).tolist() == [1, 3]
    assert longest(lengths, rows, PackedShape(128, 9, 9, 40), 2, 0.15).tolist() == [1]


def test_the_global_batch_is_kept_whatever_the_number_of_processes(run, tmp_path: Path) -> None:
    """Two processes, and one that goes on from them with the same rows; the accumulation is found."""
    write_rows(tmp_path / "rows.jsonl", 80)
    options = (
        *("--train-file", "rows.jsonl", "--max-length", 64, "--epochs", 1, "--eval-fraction", 0, "--log-every", 1),
        *("--padding", "dynamic", "--dropout", 0),
    )
    two = accelerate_file(tmp_path / "two.yaml", 2, 1)
    done = run(*options, "--global-batch-size", 16, "--accelerate", two, "--output-dir", "found")
    assert done.result["updates"] == 5
    assert "micro-batches of 8 are the largest even division that fits here" in done.stderr
    plain = run(*options, "--batch-size", 16, "--accelerate", "cpu", "--output-dir", "plain")
    assert plain.result["updates"] == 5
    losses = [[line["loss"] for line in metrics(tmp_path / folder)] for folder in ("found", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_global_batch_that_cannot_be_shared_is_refused(run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 30)
    two, four = accelerate_file(tmp_path / "two.yaml", 2, 1), accelerate_file(tmp_path / "four.yaml", 1, 4)
    done = run("--train-file", "rows.jsonl", "--global-batch-size", 15, "--accelerate", two)
    assert done.code == 2
    assert "--global-batch-size is 15, allowed is a multiple of the number of processes, 2" in done.stderr
    done = run("--train-file", "rows.jsonl", "--global-batch-size", 16, "--accelerate", four, "--output-dir", "other")
    assert done.code == 2
    assert "gradient_accumulation_steps: 4" in done.stderr


def test_a_bad_division_and_full_rows_are_said(run, tmp_path: Path) -> None:
    """1,031 is a prime, of which one sequence fits; short texts fill a row of 128 tokens several at a time."""
    write_rows(tmp_path / "rows.jsonl", 40)
    options = ("--train-file", "rows.jsonl", "--eval-fraction", 0, "--max-steps", 1, "--accelerate", "cpu")
    done = run(*options, "--global-batch-size", 1031, "--max-length", 128, "--output-dir", "prime")
    assert done.code == 0, done.stderr
    assert "1031 sequences a process divide badly: 1 fit and 1031 do not" in done.stderr
    assert "a packed row has --max-length tokens at least, here 128, and holds" in done.stderr
    assert ", not 1031; lower --max-length" in done.stderr
    for size, folder in (
        (32, "even"),
        (4, "small"),
    ):  # the small one fills rows of a multiple of 128 tokens, more than 64
        done = run(*options, "--global-batch-size", size, "--max-length", 64, "--output-dir", folder)
        assert done.code == 0, done.stderr
        assert "warning" not in done.stderr
