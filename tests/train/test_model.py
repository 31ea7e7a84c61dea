"""The learning rate of every update, by hand."""

from __future__ import annotations

import pytest

from app.train.config import TrainConfig
from app.train.model import peak_rate, rate, warm_up


def test_rate_rises_and_falls_to_zero() -> None:
    """10 updates, 2 of warm-up, peak 3: 1, 2, then 3 falling by 3/8 to 3/8 for the last."""
    found = [rate(i, 10, 3.0, 2) for i in range(10)]
    assert found == pytest.approx([1, 2, 3, 2.625, 2.25, 1.875, 1.5, 1.125, 0.75, 0.375])
    assert [rate(i, 2, 4.0, 0) for i in range(3)] == [4.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("ratio", "pretrained", "hidden", "total", "expected"),
    [
        (-1.0, True, 768, 1000, 60),
        (-1.0, False, 256, 1000, 60),
        (-1.0, False, 768, 700, 210),
        (-1.0, False, 1024, 1_000_000, 10_000),
        (0.0, False, 768, 700, 0),
        (0.1, False, 768, 700, 70),
        (0.1, True, 768, 700, 70),
    ],
)
def test_how_long_it_rises(ratio: float, pretrained: bool, hidden: int, total: int, expected: int) -> None:
    assert warm_up(TrainConfig(warmup_ratio=ratio), pretrained, hidden, total) == expected


def test_where_it_rises_to() -> None:
    assert peak_rate(TrainConfig(), True, 768) == 5e-5
    assert [peak_rate(TrainConfig(), False, hidden) for hidden in (512, 768, 1024)] == [5e-4, 1e-4, 1e-4]
    assert peak_rate(TrainConfig(lr=3e-3), False, 768) == 3e-3
