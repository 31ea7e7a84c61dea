"""Two trainings are the same when every logged loss agrees; other updates are no comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.errors import Fault
from app.host import compare


def outcome(folder: Path, cuda: str, losses: dict[int, float]) -> compare.Outcome:
    folder.mkdir()
    lines = [{"step": s, "loss": v} for s, v in losses.items()] + [{"step": max(losses), "eval_loss": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"eval_loss": 0.5, "accuracy": 0.75, "useful_tokens_per_s": 1000.0, "peak_host_memory_gib": 1.5}
    environment = {"variant": cuda, "packages": {"torch": "2.4.1"}}
    (folder / "run.json").write_text(json.dumps({"environment": environment, "result": result}))
    return compare.read(folder)


def test_the_largest_difference_is_relative_to_the_first(tmp_path: Path) -> None:
    first = outcome(tmp_path / "a", "11.7", {10: 2.0, 20: 1.0})
    second = outcome(tmp_path / "b", "12.1", {10: 2.01, 20: 1.02})
    assert compare.largest_difference([first, second]) == pytest.approx(0.02)
    assert compare.largest_difference([first, first]) == 0


def test_other_updates_are_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(Fault):
        compare.largest_difference(
            [outcome(tmp_path / "a", "11.7", {10: 2.0}), outcome(tmp_path / "b", "12.1", {20: 2.0})]
        )


def test_the_table_has_a_column_for_each_variant(tmp_path: Path) -> None:
    from rich.console import Console

    console = Console(width=100, record=True)
    console.print(
        compare.table([outcome(tmp_path / "a", "11.7", {10: 2.0}), outcome(tmp_path / "b", "12.1", {10: 2.0})])
    )
    text = console.export_text()
    assert "11.7 (torch 2.4.1)" in text and "12.1 (torch 2.4.1)" in text and "0.7500" in text and "1.00x" in text


@pytest.mark.parametrize(
    ("cudas", "arguments", "said"),
    [(["12.1"], [], "two variants"), (["11.7", "12.1"], ["--dropout=0.5"], "--dropout=0.5 is set by compare")],
)
def test_what_it_cannot_compare(cudas: list[str], arguments: list[str], said: str) -> None:
    with pytest.raises(Fault) as caught:
        compare.compare(cudas, arguments, "venv")
    assert said in str(caught.value)
