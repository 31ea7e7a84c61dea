"""What a masked-language run is measured against."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from runs import write_rows

from app.bench import material
from app.train.data import Split, frequency_loss


class Given(material.Rows):
    """Rows with these tokens."""

    def __init__(self, sequences: tuple[list[int], ...]) -> None:
        super().__init__(np.array([len(s) for s in sequences]), np.zeros(len(sequences), np.int32))
        object.__setattr__(self, "sequences", sequences)  # the class is frozen

    def one(self, row: int) -> np.ndarray:
        return np.array(self.sequences[row])


def split(*sequences: list[int]) -> Split:
    return Split(Given(sequences), np.arange(len(sequences)), np.zeros(len(sequences), np.int64))


def test_loss_of_knowing_frequencies_only() -> None:
    """Tokens 2, 3, 4 seen 5, 2 and 0 times, so 5.5, 2.5 and 0.5 of 8.5; asked for three, none and one; 0 and 1 are special."""
    special = np.array([True, True, False, False, False])
    train, held = split([0, 2, 2, 3, 2, 1], [0, 3, 2, 2, 1]), split([0, 2, 4, 2, 1], [0, 2, 1])
    want = -(3 * math.log(5.5 / 8.5) + math.log(0.5 / 8.5)) / 4
    assert frequency_loss(train, held, special) == pytest.approx(want)


def test_a_run_that_learnt_no_context_says_so(call, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    done = call("--task", "mlm", "--train-file", "rows.jsonl", "--max-steps", 2, "--accelerate", "cpu")
    assert done.result["eval_loss"] > done.result["frequency_loss"] > 1
    assert f"gives an evaluation loss of {done.result['frequency_loss']:.4f}" in done.stderr
    assert "warning: the model makes next to no use of context" in done.stderr
