"""Scores against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from app.train.evaluate import scores


def test_accuracy_and_macro_f1() -> None:
    """Class 0: 3 of 4 right, 1 predicted wrongly: F1 6/8. Class 1: 2 of 3 right: F1 4/6. Class 2 neither occurs nor is predicted."""
    table = np.array([[3, 1, 0], [1, 2, 0], [0, 0, 0]])
    found = scores(table)
    assert found["accuracy"] == pytest.approx(5 / 7)
    assert found["f1"] == pytest.approx((6 / 8 + 4 / 6) / 2)
