"""The benchmark counts what was consumed, and its verdicts follow from its numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from app.bench import contenders, material, suites
from app.bench.__main__ import machine, main, table
from app.bench.contenders import Plan, Result
from app.train import packed

PLAN = Plan(windows=2, updates=1, warmup=1)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(material, "LONGEST", 32)


def test_rows_are_the_same_whenever_asked_for() -> None:
    store = material.rows(50)
    assert store.lengths.min() >= 8
    assert store.lengths.max() <= 32
    ids, bounds = store.ids(np.array([3, 7, 3]))
    assert (ids[bounds[0] : bounds[1]] == ids[bounds[2] : bounds[3]]).all()
    assert ids[0] == material.CLS
    assert ids[bounds[1] - 1] == material.SEP


def test_masks_follow_berts_recipe() -> None:
    store = material.Rows(np.full(300, 32), np.zeros(300, np.int32))
    kept = masks = total = 0
    for row in range(300):
        ids, labels = material.masked(store, row)
        chosen = labels != -100
        assert chosen.sum() == round(30 * 0.15)
        assert not chosen[[0, -1]].any()
        assert (labels[chosen] == store.one(row)[chosen]).all()
        assert (ids[~chosen] == store.one(row)[~chosen]).all()
        total += chosen.sum()
        masks += (ids[chosen] == material.MASK).sum()
        kept += (ids[chosen] == labels[chosen]).sum()
    assert masks / total == pytest.approx(0.8, abs=0.05)
    assert kept / total == pytest.approx(0.1, abs=0.04)


@pytest.mark.parametrize("task", ["mlm", "classify"])
def test_contenders_count_the_tokens_they_consumed(task: str) -> None:
    """All rows have one length, so that the tokens of an update are known."""
    store = material.Rows(np.full(64, 16), np.arange(64, dtype=np.int32) % 2)
    theirs = contenders.hugging_face("theirs", task, "bert-tiny", store, 4, PLAN, width=32)
    mine = contenders.ours("mine", task, "bert-tiny", store, 4, PLAN)
    assert theirs.tokens_an_update == 4 * 16
    assert mine.tokens_an_update == pytest.approx(128)  # rows of 128 tokens, the smallest there are
    for result in (theirs, mine):
        assert len(result.windows) == 2
        assert min(result.windows) > 0
        assert result.as_dict()["lowest"] <= result.as_dict()["useful_tokens_per_s"] <= result.as_dict()["highest"]


def test_chains_can_be_learnt() -> None:
    """Three tokens in four follow from the one before; a model that learns that has a loss under that of guessing."""
    store = material.Chains(np.full(20, 32), np.zeros(20, np.int32))
    follows = np.random.Generator(np.random.PCG64(0)).permutation(400) + material.FIRST_WORD
    ids = np.stack([store.one(row) for row in range(20)])[:, 1:-1]
    assert (ids[:, 1:] == follows[ids[:, :-1] - material.FIRST_WORD]).mean() == pytest.approx(0.75, abs=0.06)


def test_packed_prediction_must_agree() -> None:
    results = contenders.prediction("bert-tiny", material.rows(40), 8, 1)
    assert [len(result.windows) for result in results] == [1, 1, 1]


def test_disagreeing_predictions_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = packed.classification_logits
    monkeypatch.setattr(packed, "classification_logits", lambda model, batch: -logits(model, batch))
    with pytest.raises(RuntimeError, match="agrees with padded prediction"):
        contenders.prediction("bert-tiny", material.rows(40), 8, 1)


def test_verdicts() -> None:
    def result(name: str, rate: float, peak: int = 0) -> Result:
        return Result(name, [rate, rate * 2, rate / 2], peak, 1000.0, 1e9)

    names = {
        "bert-base MLM, packed": result("mine", 450.0, 10**9),
        f"bert-base MLM, {suites.GROUPED}, batch 128": result("grouped", 100.0),
        f"bert-base MLM, {suites.USUAL}, batch 32": result("usual", 50.0),
        f"bert-base MLM, {suites.DYNAMIC}, batch 128": result("dynamic", 60.0, 10**10),
    }
    made = {f.name: f.as_dict(matrix_tflops=1.0) for f in suites.figures(names, gpu=True)}
    assert len(made) == 4
    best, usual, share, memory = made.values()
    assert (best["measured"], best["verdict"]) == (4.5, "must reached")
    assert (usual["measured"], usual["verdict"]) == (9.0, "below must")
    assert (share["measured"], share["verdict"]) == (45.0, "below must")
    assert (memory["measured"], memory["verdict"]) == (0.1, "aim reached")


def test_each_kind_takes_its_own_rows() -> None:
    """With fp8, classification and BERT-large beside: eight figures of MLM and classification, and two rates."""
    rates = {
        f"bert-base MLM, {suites.GROUPED}, batch 128": 10.0,
        "bert-base MLM, packed": 30.0,
        "bert-base MLM, packed, fp8": 40.0,
        f"bert-base classification, {suites.GROUPED}, batch 128": 20.0,
        "bert-base classification, packed": 50.0,
        "bert-base classification, packed, fp8": 70.0,
        "bert-large MLM, packed": 240_000.0,
        "bert-large MLM, packed, fp8": 360_000.0,
    }
    results = {name: Result(name, [rate], 10**9, 10.0, 1e10) for name, rate in rates.items()}
    made = {f.name: f.as_dict(1.0) for f in suites.figures(results, gpu=True)}
    best, classes = (
        "MLM against HF Trainer at its best (grouped by length), times",
        "classification against HF Trainer grouped by length, times",
    )
    assert [made[name]["measured"] for name in (best, "with fp8: " + best)] == [3.0, 4.0]
    assert [made[name]["measured"] for name in (classes, "with fp8: " + classes)] == [2.5, 3.5]
    assert [made[name]["verdict"] for name in (best, "with fp8: " + best)] == ["below must", "must reached"]
    large = "BERT-large, useful tokens/s"
    assert [made[name]["verdict"] for name in (large, "with fp8: " + large)] == ["must reached", "aim reached"]


def test_table_shows_every_result_and_figure() -> None:
    rows = [Result("someone", [1000.0], 2**30, 100.0, 1e9)]
    figure = suites.Figure("speed, times", 2.0, 1.0, 3.0)
    report = {
        "machine": machine(), "matrix_tflops": 100.0,
        "results": [r.as_dict() for r in rows], "figures": [figure.as_dict(100.0)],
        "accuracy": [{"name": "learner", "eval_losses": [1.0, 2.0, 3.0], "mean": 2.0, "deviation": 1.0}],
    }  # fmt: skip
    text = table(report)
    assert "someone" in text
    assert "1,000" in text
    assert "must reached" in text
    assert "1.0000, 2.0000, 3.0000" in text
    assert torch.__version__.split("+")[0] in text


def test_what_was_measured_survives_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut_short(parts: object, windows: int, gpu: bool, done: Callable[[Result], None]) -> None:
        done(Result("the first", [1000.0], 0, 100.0, 1e9))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(suites, "run", cut_short)
    monkeypatch.setattr(suites, "matrix_rate", lambda: 1e12)
    with pytest.raises(RuntimeError, match="out of memory"):
        main(["--json", str(tmp_path / "bench.json")])
    assert "the first" in capsys.readouterr().out
    assert json.loads((tmp_path / "bench.json").read_text())["results"][0]["useful_tokens_per_s"] == 1000


def test_learnt_returns_a_loss_below_guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few updates of a tiny model, evaluated by the trainer on rows it did not see."""
    rows = material.rows
    monkeypatch.setattr(material, "rows", lambda count: rows(64 + 16) if count > 80 else rows(count))
    data = material.training_data
    monkeypatch.setattr(material, "training_data", lambda store, folder, task, held: data(store, folder, task, 16))
    loss = contenders.learnt("bert-tiny", 64, "packed", 0)
    assert 5 < loss < np.log(material.VOCABULARY) + 0.2
