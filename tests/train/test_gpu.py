"""What only a GPU can show: fp16 with its loss scale, recorded passes, and going on from a checkpoint there."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import metrics, write_rows
from test_packed import pack, small

from app.measure.clock import StepClock
from app.train import packed, packed_fused
from app.train.collate import MicroBatch
from app.train.graphs import Graphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: fp16 training and CUDA graphs")
eight_bits = pytest.mark.skipif(
    torch.cuda.is_available() and packed_fused.why_not_fp8(torch.device("cuda", 0)) is not None,
    reason="needs a GPU of compute capability 8.9 and torch 2.8: 8-bit products",
)


def weights(output: Path) -> bytes:
    return (output / "model" / "model.safetensors").read_bytes()


def config(path: Path, accumulation: int) -> Path:
    path.write_text(
        f"distributed_type: 'NO'\nmixed_precision: fp16\nnum_processes: 1\ngradient_accumulation_steps: {accumulation}\n"
    )
    return path


@pytest.mark.parametrize("task", ["classify", "mlm"])
@pytest.mark.parametrize(("accumulation", "fp8"), [(1, ()), (3, ()), pytest.param(3, ("--fp8",), marks=eight_bits)])
def test_recorded_passes_give_the_bytes_of_plain_ones(call, tmp_path: Path, task: str, accumulation: int, fp8) -> None:
    """Dropout on, evaluations between, a ragged last window."""
    write_rows(tmp_path / "rows.jsonl", 150)
    options = (
        *("--task", task, "--train-file", "rows.jsonl", "--batch-size", 8, "--epochs", 2, "--deterministic"),
        *("--save-every", 0, "--accelerate", config(tmp_path / "one.yaml", accumulation)),
        *fp8,
    )
    for graphs in ("auto", "no"):
        done = call(*options, "--cuda-graphs", graphs, "--output-dir", graphs)
        assert done.result["skipped"] == 0
        assert "without CUDA graphs" not in done.stderr
    assert weights(tmp_path / "auto") == weights(tmp_path / "no")
    losses = [[line["loss"] for line in metrics(tmp_path / d) if "loss" in line] for d in ("auto", "no")]
    assert losses[0] == losses[1]


def test_going_on_gives_the_bytes_of_the_run_that_never_stopped(call, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 100)
    options = (
        *("--task", "mlm", "--train-file", "rows.jsonl", "--batch-size", 8, "--max-steps", 9, "--deterministic"),
        *("--save-every", 4, "--keep", 5, "--accelerate", config(tmp_path / "two.yaml", 2)),
    )
    call(*options, "--output-dir", "whole").result  # noqa: B018
    for step in (4, 8):
        there = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
        done = call(*options, "--output-dir", f"from{step}", "--resume", there)
        assert done.result["updates"] == 9
        assert weights(tmp_path / f"from{step}") == weights(tmp_path / "whole")


def test_an_overflow_is_counted_and_does_not_move_the_learning_rate(call, tmp_path: Path) -> None:
    """A first loss scale of 2^28 overflows in fp16 until it has been halved often enough."""
    write_rows(tmp_path / "rows.jsonl", 100)
    options = (
        *("--train-file", "rows.jsonl", "--batch-size", 8, "--max-steps", 24, "--log-every", 1, "--save-every", 0),
        *("--accelerate", config(tmp_path / "one.yaml", 1)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp.GradScaler.__init__, "__defaults__", raised(torch.amp.GradScaler.__init__.__defaults__))
        done = call(*options, "--output-dir", "out")
    skipped = done.result["skipped"]
    assert 0 < skipped < 24
    lines = [line for line in metrics(tmp_path / "out") if "lr" in line]
    assert lines[-1]["skipped"] == skipped and len(lines) == 24
    overflows = [line["skipped"] for line in lines]
    for place in range(1, 24):
        if overflows[place - 1] > (overflows[place - 2] if place > 1 else 0):
            assert lines[place]["lr"] == lines[place - 1]["lr"]
            assert lines[place]["loss_scale"] <= lines[place - 1]["loss_scale"]


def raised(defaults: tuple) -> tuple:
    """The defaults of GradScaler's constructor with the first loss scale, 2^16, raised to 2^28."""
    return tuple(2.0**28 if value == 2.0**16 else value for value in defaults)


def test_fifty_overflows_in_a_row_end_the_run_and_name_the_last_checkpoint(call, tmp_path: Path) -> None:
    """The first update throws the weights out of fp16's range, so no later one is finite at any loss scale."""
    write_rows(tmp_path / "rows.jsonl", 100)
    options = (
        *("--train-file", "rows.jsonl", "--batch-size", 8, "--log-every", 1000, "--eval-fraction", 0),
        *("--accelerate", config(tmp_path / "one.yaml", 1), "--output-dir", "out"),
    )
    done = call(*options, "--max-steps", 90, "--lr", 1e9, "--warmup-ratio", 0, "--clip", 0, "--save-every", 0)
    assert done.code == 4
    assert "50 updates in a row overflowed in fp16" in done.stderr
    assert "there is no checkpoint yet" in done.stderr
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_recorded_passes_of_two_processes_train_as_ddp_does(run, tmp_path: Path, accumulation: int) -> None:
    write_rows(tmp_path / "rows.jsonl", 150)
    two = config(tmp_path / "two.yaml", accumulation)
    two.write_text(two.read_text().replace("'NO'", "MULTI_GPU").replace("num_processes: 1", "num_processes: 2"))
    options = (
        *("--task", "mlm", "--train-file", "rows.jsonl", "--batch-size", 8, "--epochs", 2, "--log-every", 1),
        *("--save-every", 0, "--accelerate", two),
    )
    for graphs in ("auto", "no"):
        done = run(*options, "--cuda-graphs", graphs, "--output-dir", graphs)
        assert done.result["updates"] > 4
        assert "without CUDA graphs" not in done.stderr
    losses = [[line["loss"] for line in metrics(tmp_path / d) if "loss" in line] for d in ("auto", "no")]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


class Half(torch.nn.Module):
    """A learner as Accelerate hands it over: under fp16 autocast."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, row: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            return packed.loss(self.model, packed.PackedBatch(**row))


@pytest.fixture
def alone(tmp_path: Path):
    """A process group of one, in which a sum over all processes is what was there."""
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("task", ["classify", "mlm"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("compress", "fp8"), [("no", False), ("bf16", False), pytest.param("no", True, marks=eight_bits)]
)
def test_recorded_gradients_are_those_of_autograd(alone, task: str, several: bool, compress: str, fp8: bool) -> None:
    """Also where the backward pass is cut into parts; three micro-batches that add up, twice; the weights in two parts are tied."""
    learner = Half(small(task, torch.float32, sizes=(64, 128)).cuda())
    packed.use_fp8(learner.model, fp8)
    rows = [pack(task, lengths, 128, seed) for seed, lengths in enumerate(([20, 24, 9], [24, 11], [3, 17, 22, 5]))]
    names = [f.name for f in dataclasses.fields(packed.PackedBatch) if f.name not in ("lengths", "seeds", "cuts")]
    length = max(len(row.cu_seqlens) for row in rows), max(len(row.targets) for row in rows)
    micros = []
    for row in rows:
        last = row.cu_seqlens[-1:].expand(length[0] - len(row.cu_seqlens))
        spare = length[1] - len(row.targets)
        row.cu_seqlens = torch.cat((row.cu_seqlens, last))
        row.target_positions = torch.cat((row.target_positions, torch.zeros(spare, dtype=torch.long)))
        row.targets = torch.cat((row.targets, torch.full((spare,), -100)))
        micros.append(MicroBatch({name: getattr(row, name) for name in names}, 1, 1, 1, 1, 1))
    device = torch.device("cuda", torch.cuda.current_device())
    processes = 2 if several else 1
    accelerator = SimpleNamespace(device=device, num_processes=processes, scaler=None, autocast=nullcontext)
    recorded = Graphs(learner, accelerator, micros[0], 3, compress)
    assert len(recorded.parts) == (3 if several else 1)
    for _ in range(2):
        learner.zero_grad()
        losses = [recorded.step(m, 512.0, k == 0, k == 2, StepClock(device)).item() for k, m in enumerate(micros)]
        got = {name: p.grad.clone() for name, p in learner.named_parameters()}
        learner.zero_grad()
        for micro, loss in zip(micros, losses, strict=True):
            found = learner(micro.to(device))
            (found * 512.0).backward()
            assert found.item() == loss
        for name, parameter in learner.named_parameters():
            # a cut in fp8 rounds a sum to fp16 that is else not rounded, and what follows to 8 bits
            exact = 1e-5 if not several else 0.1 if fp8 else 1e-2 if compress != "no" else 1e-5
            assert (got[name] - parameter.grad).norm() <= exact * parameter.grad.norm() + 1e-6, name
