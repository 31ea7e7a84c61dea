"""The same global batch gives the same training, whatever processes and accumulation share it."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import accelerate_file, metrics, write_rows
from safetensors.torch import load_file

TOLERANCE = 1e-5  #: float32 rounding: the largest difference seen was 1.2e-6


@pytest.mark.parametrize(
    ("task", "padding", "layouts"),
    [
        # processes, accumulation, batch; 91 training rows leave a last update of 3 sequences for 8 places
        ("mlm", "dynamic", [(1, 1, 8), (1, 4, 2), (2, 1, 4), (2, 2, 2)]),
        ("classify", "dynamic", [(1, 1, 8), (2, 2, 2)]),
        ("classify", "fixed", [(1, 1, 8), (1, 8, 1)]),
        ("mlm", "packed", [(1, 4, 6), (2, 2, 6)]),
        ("classify", "packed", [(1, 2, 8), (2, 1, 8)]),
    ],
)
def test_layouts_agree(run, tmp_path: Path, task: str, padding: str, layouts: list[tuple[int, int, int]]) -> None:
    write_rows(tmp_path / "rows.jsonl", 101)
    weights, curves = [], []
    for processes, accumulation, batch in layouts:
        name = f"{processes}x{accumulation}x{batch}"
        config = accelerate_file(tmp_path / f"{name}.yaml", processes, accumulation)
        done = run(
            "--task",
            task,
            "--train-file",
            "rows.jsonl",
            "--padding",
            padding,
            "--batch-size",
            batch,
            "--epochs",
            1,
            "--dropout",
            0,
            "--max-length",
            64,
            "--log-every",
            1,
            "--accelerate",
            config,
            "--output-dir",
            name,
        )
        assert done.code == 0, done.stderr
        weights.append(load_file(tmp_path / name / "model" / "model.safetensors"))
        curves.append(metrics(tmp_path / name))
    for other, curve in zip(weights[1:], curves[1:], strict=True):
        assert max(float((weights[0][k] - other[k]).abs().max()) for k in weights[0]) < TOLERANCE
        assert [m.get("lr") for m in curve] == [m.get("lr") for m in curves[0]]
        for mine, reference in zip(curve, curves[0], strict=True):
            for key in ("loss", "eval_loss", "grad_norm"):
                assert mine.get(key, 0) == pytest.approx(reference.get(key, 0), rel=1e-4)
            assert mine.get("accuracy") == reference.get("accuracy")


def test_the_number_of_processes_does_not_change_an_evaluation(run, tmp_path: Path) -> None:
    """Seven rows in batches of two on two processes: no row twice, none lost, the same bits of the result."""
    write_rows(tmp_path / "rows.jsonl", 40)
    write_rows(tmp_path / "eval.jsonl", 7)
    found = []
    for processes in (1, 2):
        config = accelerate_file(tmp_path / f"{processes}.yaml", processes, 1)
        done = run(
            "--train-file",
            "rows.jsonl",
            "--eval-file",
            "eval.jsonl",
            "--batch-size",
            1,
            "--max-steps",
            1,
            "--lr",
            1e-12,
            "--dropout",
            0,
            "--accelerate",
            config,
            "--output-dir",
            f"out{processes}",
        )
        found.append({k: done.result[k] for k in ("eval_loss", "accuracy", "f1")})
    assert found[0]["accuracy"] == found[1]["accuracy"] and found[0]["f1"] == found[1]["f1"]
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], abs=1e-7)
    assert (found[0]["accuracy"] * 7) % 1 == pytest.approx(0, abs=1e-9)
