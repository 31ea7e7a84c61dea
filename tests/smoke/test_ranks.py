"""Faults put into real ranks: each is found, the rank is named, and it ends."""

from __future__ import annotations

import pytest

from app.smoke.cpu import check_gloo
from app.smoke.ranks import Ranks, ranks_report, run_ranks
from app.smoke.stage import module


def faulty(fault: str, quiet: float = 60) -> Ranks:
    return run_ranks(
        module("tests.smoke.faults.rank", fault), 2, limit=120, quiet=quiet, extra={"OMP_NUM_THREADS": "1"}
    )


def test_two_good_ranks() -> None:
    report = check_gloo()
    assert report.status == "passed", report


def test_a_killed_rank_is_named() -> None:
    ranks = faulty("dies")
    assert not ranks.finished
    assert ranks.first == 1
    assert ranks.words().startswith("rank 1 was killed by SIGKILL in step 'first all_reduce'")


def test_a_rank_that_never_joins_is_named() -> None:
    ranks = faulty("absent", quiet=25)
    assert ranks.culprits() == [1]
    assert ranks.words().startswith("rank 1 never came to step 'join' (its last step is 'started')")


def test_a_rank_that_never_comes_to_the_collective_is_named() -> None:
    ranks = faulty("stuck", quiet=25)
    report = ranks_report("NCCL", ranks, "cause", "fix")
    assert report.status == "failed"
    assert report.summary.startswith("rank 1 never came to step 'first all_reduce'")
    assert "no progress for 25 s" in report.summary


def test_an_exception_in_one_rank_is_not_blamed_on_the_other() -> None:
    ranks = faulty("raises")
    report = ranks_report("NCCL", ranks, "cause", "fix")
    assert ranks.first == 1
    assert "ECC" in report.summary
    assert "ECC" in report.cause


def test_a_wrong_value_is_found_and_the_rank_named() -> None:
    ranks = faulty("corrupts")
    report = ranks_report("NCCL", ranks, "cause", "fix")
    assert ranks.first == 1
    assert "rank 1: all_reduce gave wrong values in 1 of" in report.summary
    assert "first at 777" in report.summary


@pytest.mark.parametrize("world", [1, 3])
def test_any_number_of_ranks(world: int) -> None:
    command = module("app.smoke.collectives", "--backend", "gloo", "--sizes", "1", "--kinds", "all_reduce")
    ranks = run_ranks(command, world, limit=120, quiet=110, extra={"OMP_NUM_THREADS": "1"})
    assert ranks.finished, ranks.output
    assert ranks.outcomes[0].data["all_reduce 1"]["bytes"] > 1_000_000
