"""Scores against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from app.train.evaluate import scores
from app.train.model import rate


def test_accuracy_and_macro_f1() -> None:
    """Class 0: 3 of 4 right, 1 predicted wrongly: F1 6/8. Class 1: 2 of 3 right: F1 4/6. Class 2 neither occurs nor is predicted."""
    table = np.array([[3, 1, 0], [1, 2, 0], [0, 0, 0]])
    found = scores(table)
    assert found["accuracy"] == pytest.approx(5 / 7)
    assert found["f1"] == pytest.approx((6 / 8 + 4 / 6) / 2)


def test_rate_rises_and_falls_to_zero() -> None:
    """10 updates, 2 of warm-up, peak 3: 1, 2, then 3 falling by 3/8 to 3/8 for the last."""
    found = [rate(i, 10, 3.0, 0.2) for i in range(10)]
    assert found == pytest.approx([1, 2, 3, 2.625, 2.25, 1.875, 1.5, 1.125, 0.75, 0.375])
    assert rate(10, 10, 3.0, 0.2) == 0
