"""Every row once an epoch, the same updates in every layout, rows that fit their shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.train.batches import Layout, packed_shape, plan_epoch, target_counts

lengths_of = st.lists(st.integers(3, 128), min_size=1, max_size=300).map(lambda x: np.array(x, np.int64))


def contents(plan, layout: Layout) -> list[list[list[int]]]:
    """For every update the rows of each of its micro-batches."""
    places = [(a, p) for a in range(layout.accumulation) for p in range(layout.processes)]
    return [[plan.micro_batch(u, a, p).tolist() for a, p in places] for u in range(plan.updates)]


@settings(max_examples=80, deadline=None)
@given(lengths_of, st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 3))
def test_every_row_once_an_epoch(
    lengths: np.ndarray, batch: int, accumulation: int, processes: int, packed: bool, epoch: int
) -> None:
    layout = Layout(batch, accumulation, processes)
    shape = packed_shape(lengths, batch, 128, 0.15) if packed else None
    plan = plan_epoch(np.arange(len(lengths)), lengths, 7, epoch, layout, shape, 0.15)
    seen = contents(plan, layout)
    assert sorted(r for update in seen for micro in update for r in micro) == list(range(len(lengths)))
    assert [plan.sequences(u) for u in range(plan.updates)] == [sum(map(len, update)) for update in seen]
    assert all(any(update) for update in seen)
    if shape:
        for micro in (m for update in seen for m in update):
            assert lengths[micro].sum() <= shape.tokens and len(micro) <= shape.sequences
            assert target_counts(lengths[micro], 0.15).sum() <= shape.targets


@settings(max_examples=40, deadline=None)
@given(lengths_of, st.sampled_from([(8, 1, 1), (4, 1, 2), (2, 2, 2), (2, 4, 1), (1, 8, 1)]))
def test_the_same_global_batch_has_the_same_rows_in_every_update(
    lengths: np.ndarray, layout: tuple[int, int, int]
) -> None:
    def updates(made: Layout) -> list[list[int]]:
        plan = plan_epoch(np.arange(len(lengths)), lengths, 1, 0, made, None)
        return [sorted(r for micro in update for r in micro) for update in contents(plan, made)]

    assert updates(Layout(*layout)) == updates(Layout(8, 1, 1))


def test_processes_share_the_padding_of_a_round() -> None:
    lengths = np.arange(8, 72)
    layout = Layout(8, 2, 2)
    plan = plan_epoch(np.arange(64), lengths, 0, 0, layout, None)
    widths = [
        [lengths[plan.micro_batch(u, a, p)].max() for p in range(2)] for u in range(plan.updates) for a in range(2)
    ]
    assert len(widths) == 4
    for mine, other in widths:
        assert abs(int(mine) - int(other)) <= 24, "neighbours in length belong into the same round"


def test_epochs_differ_and_a_seed_repeats() -> None:
    lengths = np.full(50, 10)

    def rows(seed: int, epoch: int) -> list[int]:
        return plan_epoch(np.arange(50), lengths, seed, epoch, Layout(50, 1, 1), None).rows.tolist()

    assert rows(0, 0) == rows(0, 0)
    assert rows(0, 0) != rows(0, 1) != rows(1, 1)


def test_packed_rows_of_natural_lengths_hold_little_padding() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(4.7, 0.75, 20000).astype(int), 8, 512)
    shape = packed_shape(lengths, 256, 512, 0.15)
    plan = plan_epoch(np.arange(len(lengths)), lengths, 0, 0, Layout(256, 1, 1), shape, 0.15)
    assert lengths.sum() / (plan.updates * shape.tokens) > 0.97


@pytest.mark.parametrize(("length", "count"), [(3, 1), (4, 1), (12, 2), (102, 15), (512, 76)])
def test_target_counts_by_hand(length: int, count: int) -> None:
    """round(0.15 x (n - 2)), at least 1: 0.15 x 510 = 76.5 rounds to even, 76."""
    assert target_counts(np.array([length]), 0.15).tolist() == [count]
