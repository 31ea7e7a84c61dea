"""The same training in several variants, side by side: what somebody needs before an old project moves to a new stack."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from app.errors import WRONG_INPUT, Fault
from app.host import images, programs, venvs
from app.host.variants import ROOT, Variant, choose

TOLERANCE = 0.01  #: largest relative difference of a logged loss that still counts as the same training
OURS = ("--output-dir", "--dropout")  #: options that compare sets itself


@dataclass(frozen=True)
class Outcome:
    """What one variant made of the training."""

    cuda: str
    torch: str
    losses: dict[int, float]  #: by update
    result: dict[str, Any]

    def speed(self) -> float:
        """Useful tokens a second, as the trainer counted them."""
        return float(self.result["useful_tokens_per_s"])


def compare(
    cudas: list[str], arguments: list[str], runtime: str = "auto", tolerance: float = TOLERANCE, root: Path = ROOT
) -> int:
    """Train with ``arguments`` in each variant, print them side by side; 0 if every loss agrees with the first variant's, else 1.

    Dropout is off, because its random numbers differ between versions of torch. Raises Fault where a training fails. Side effect:
    out/compare/<cuda>, made anew.
    """
    if len(cudas) < 2:
        raise Fault(
            "compare needs two variants or more: ./inv compare --cuda 11.7 --cuda 12.1 -- TRAINER ARGUMENTS",
            WRONG_INPUT,
        )
    if given := [word for word in arguments if word.partition("=")[0] in OURS]:
        raise Fault(f"{given[0]} is set by compare itself: results land in out/compare/CUDA, dropout is 0", WRONG_INPUT)
    chosen = [choose(cuda, root / "pinned") for cuda in dict.fromkeys(cudas)]
    where = programs.pick_runtime(runtime)
    outcomes = [_train(variant, arguments, where, root) for variant in chosen]
    difference = largest_difference(outcomes)
    Console().print(table(outcomes))
    verdict = "the same training" if difference <= tolerance else "not the same training"
    print(f"largest relative difference of a loss: {difference:.2e} (tolerance {tolerance:g}): {verdict}")
    return 0 if difference <= tolerance else 1


def _train(variant: Variant, arguments: list[str], where: str, root: Path) -> Outcome:
    folder = Path("out") / "compare" / variant.cuda
    shutil.rmtree(root / folder, ignore_errors=True)
    words = [*arguments, "--dropout", "0", "--output-dir", str(folder)]
    print(f"== {variant.cuda}: {variant.summary}", flush=True)
    if where == "docker":
        images.ensure(variant, root)
        code = programs.run_service("train", words, variant, root, terminal=False)
    else:
        python = venvs.ensure(variant, root)
        command = [str(python), "-m", "app.train", *words]
        code = subprocess.run(command, env=venvs.program_environment(variant, root), cwd=root, check=False).returncode
    if code:
        raise Fault(f"training in {variant.cuda} ended with exit code {code} (its own words are above)", code)
    return read(root / folder)


def read(folder: Path) -> Outcome:
    """The outcome that a trainer left in ``folder``."""
    described = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    environment = described["environment"]
    return Outcome(environment["variant"], environment["packages"]["torch"], losses, described["result"])


def largest_difference(outcomes: list[Outcome]) -> float:
    """Largest |loss - first variant's loss| / first variant's loss over all logged updates. Raises Fault if the updates differ."""
    first, worst = outcomes[0], 0.0
    for other in outcomes[1:]:
        if other.losses.keys() != first.losses.keys() or not first.losses:
            raise Fault(
                f"{first.cuda} logged {len(first.losses)} updates and {other.cuda} {len(other.losses)}: they did not train on the same",
                1,
            )
        worst = max([worst, *(abs(other.losses[s] - first.losses[s]) / abs(first.losses[s]) for s in first.losses)])
    return worst


def table(outcomes: list[Outcome]) -> Table:
    """One column a variant: losses along the way, then the result, speed and memory."""
    made = Table("", *(f"{o.cuda} (torch {o.torch})" for o in outcomes), title="the same training")
    steps = sorted(outcomes[0].losses)
    for step in sorted({steps[round(i * (len(steps) - 1) / 5)] for i in range(6)}):
        made.add_row(f"loss, update {step}", *(f"{o.losses[step]:.5f}" for o in outcomes))
    for key, shown in (
        ("eval_loss", ".5f"),
        ("accuracy", ".4f"),
        ("f1", ".4f"),
        ("perplexity", ".2f"),
        ("useful_tokens_per_s", ",.0f"),
    ):
        if key in outcomes[0].result:
            made.add_row(key, *(format(o.result[key], shown) for o in outcomes))
    made.add_row("speed against the first", *(f"{o.speed() / outcomes[0].speed():.2f}x" for o in outcomes))
    memory = "peak_memory_gib" if "peak_memory_gib" in outcomes[0].result else "peak_host_memory_gib"
    made.add_row(
        "memory, GiB" + (" (GPU)" if memory == "peak_memory_gib" else ""),
        *(f"{o.result[memory]:.2f}" for o in outcomes),
    )
    return made
