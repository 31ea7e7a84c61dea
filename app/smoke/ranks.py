"""Runs one program as several ranks, each a stage of its own, and names the rank that failed, died or never came."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.hardware.report import Report, failed
from app.smoke.explain import explain
from app.smoke.stage import Outcome, Stage, last_words

#: Seconds that the other ranks get to say their part after one has failed.
GRACE = 2.0


@dataclass
class Ranks:
    """How the ranks of one run ended."""

    outcomes: list[Outcome]
    first: int | None  #: the rank that ended badly before any other, None when none did by itself

    @property
    def finished(self) -> bool:
        """True when every rank came to its end."""
        return all(outcome.finished for outcome in self.outcomes)

    @property
    def seconds(self) -> float:
        """Wall time of the slowest rank."""
        return max(outcome.seconds for outcome in self.outcomes)

    @property
    def output(self) -> str:
        """The end of what all ranks printed, the culprit's last."""
        order = sorted(range(len(self.outcomes)), key=lambda rank: rank == self.first)
        return "\n".join(self.outcomes[rank].output[-4000:] for rank in order)

    def culprits(self) -> list[int]:
        """The ranks to look at: the first that failed, else those that are behind the others, else all."""
        if self.first is not None:
            return [self.first]
        done = [len(outcome.marks) for outcome in self.outcomes]
        behind = [rank for rank, marks in enumerate(done) if marks < max(done)]
        return behind or [rank for rank, outcome in enumerate(self.outcomes) if not outcome.finished]

    def words(self) -> str:
        """What happened, with the number of the rank, for a report."""
        if self.first is not None:
            return f"rank {self.first} {self.outcomes[self.first].words()}; the others waited for it"
        culprits = self.culprits()
        names = ", ".join(str(rank) for rank in culprits)
        if len(culprits) == len(self.outcomes):
            return f"all ranks hang together: rank 0 {self.outcomes[0].words()}"
        others = next(o for rank, o in enumerate(self.outcomes) if rank not in culprits)
        return (
            f"rank {names} never came to step '{others.last}' (its last step is "
            f"'{self.outcomes[culprits[0]].last}'), the others {others.hung or 'waited'} there"
        )


def run_ranks(
    command: Sequence[str],
    world: int,
    *,
    limit: float,
    quiet: float,
    extra: Mapping[str, str] | None = None,
    each: Sequence[Mapping[str, str]] | None = None,
) -> Ranks:
    """Start ``world`` processes of ``command`` and wait for them; returns after ``limit`` seconds at the latest.

    Each gets RANK, WORLD_SIZE, LOCAL_RANK and KIT_RENDEZVOUS (an address for torch's init_method), and the entry of
    ``each`` for its rank. The ranks meet through a file, so no port can be taken.
    """
    with tempfile.TemporaryDirectory(prefix="smoke-ranks-") as folder:
        stages = []
        for rank in range(world):
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "KIT_RENDEZVOUS": f"file://{folder}/store",
                **(extra or {}),
                **(each[rank] if each else {}),
            }
            stages.append(Stage(command, limit=limit, quiet=quiet, extra=own))
        ended: list[int] = []  # ranks that ended badly, in the order in which it was seen
        hung = ""
        while any([stage.running() for stage in stages]) and not ended and not hung:
            time.sleep(0.05)
            ended, hung = _look(stages)
        if ended and not hung:
            until = time.monotonic() + GRACE
            while time.monotonic() < until and any([stage.running() for stage in stages]):
                time.sleep(0.05)
            ended += [rank for rank in _look(stages)[0] if rank not in ended]
        for stage in stages:
            if stage.running():
                stage.end(hung or "was ended because another rank failed")
        outcomes = [stage.outcome() for stage in stages]
        return Ranks(outcomes, _culprit(ended, outcomes))


def _look(stages: list[Stage]) -> tuple[list[int], str]:
    """Ranks that ended badly by themselves, and the limit that one of them passed, if any."""
    states = [stage.status() for stage in stages]
    hung = next((why for _, why in states if why), "")
    return [rank for rank, (code, why) in enumerate(states) if code and not why], hung


def _culprit(ended: list[int], outcomes: list[Outcome]) -> int | None:
    """Which rank began it. Several may end within one look: a signal from outside tells more than an exception, and an
    exception about a lost peer tells least."""
    if not ended:
        return None

    def suspicion(rank: int) -> int:
        outcome = outcomes[rank]
        if outcome.code is not None and outcome.code < 0 and outcome.code != -signal.SIGABRT:
            return 0
        known = explain(outcome.output)
        return 2 if known and known.name in ("peer-died", "collective-timeout") else 1

    return min(ended, key=suspicion)


def ranks_report(name: str, ranks: Ranks, cause: str, fix: str) -> Report:
    """A failed report for ranks that did not come to their end; the catalogue's cause goes before ``cause``."""
    known = explain(ranks.output)
    culprit = ranks.outcomes[ranks.culprits()[0]]
    last = last_words(culprit.output) if not culprit.hung else ""
    return failed(
        name,
        ranks.words() + (f": {last}" if last else ""),
        known.cause if known else cause,
        known.fix if known else fix,
        ranks=[{"marks": o.marks, "code": o.code, "hung": o.hung} for o in ranks.outcomes],
        output=ranks.output[-4000:],
        seconds=round(ranks.seconds, 2),
    )
