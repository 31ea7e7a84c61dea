"""The learning rate of every update, by hand."""

from __future__ import annotations

import pytest

from app.train.config import TrainConfig
from app.train.model import peak_rate, rate, warm_up


def test_a_rise_and_a_fall() -> None:
    rates = [rate(applied, 6, 4.0, 3) for applied in range(7)]
    assert rates == pytest.approx([1.0, 2.0, 3.0, 4.0, 8 / 3, 4 / 3, 0.0])
    assert [rate(applied, 2, 4.0, 0) for applied in range(3)] == [4.0, 2.0, 0.0]


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
