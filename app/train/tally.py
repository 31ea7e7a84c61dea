"""What was really consumed: targets, tokens and sequences of all processes, counted as they go by, never planned."""

from __future__ import annotations

import math
import resource
from typing import Any

import torch

from app.hardware.peaks import dense_tflops
from app.measure.clock import StepClock
from app.measure.flops import Work

COUNTS = ("loss", "targets", "useful", "tokens", "sequences", "squares")
MOST_WAITING = 0.1  #: share of the time spent waiting from which a run names it and what to do
MOST_OVER = 1.1  #: times the median from which a process is called slow
PARTS = ("data", "copy", "counting", "forward", "backward", "communication", "optimizer", "logging")


class Tally:
    """Sums since the last logged line (the window) and of the run. Until gathered, the window holds this process's share."""

    def __init__(self) -> None:
        self.applied = self.skipped = self.skipped_in_a_row = 0
        self.updates = 0  # in the window
        self.rate, self.scale = 0.0, 1.0  # of the last update
        self.run = dict.fromkeys((*COUNTS, "seconds", "operations"), 0.0)
        # Of this process's life, without its first window, which warms up.
        self.steady = {"seconds": 0.0, "useful": 0.0, "sequences": 0.0, "data": 0.0, "communication": 0.0}
        self.windows = 0  # steady ones
        #: by process: how far it was over the median, in each window in which it was the slowest
        self.slowest: dict[int, list[float]] = {}
        self.warm = False
        self.note = ""
        self._window = dict.fromkeys(COUNTS, 0.0)
        self._carried = dict.fromkeys(
            COUNTS, 0.0
        )  # what the window holds from before a checkpoint: not of this process's time
        self._loss: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self._norms: torch.Tensor | None = None

    def count(self, micro: Any, loss: torch.Tensor) -> None:
        """Add one micro-batch and its summed loss; does not wait for the device."""
        for name in COUNTS[1:]:
            self._window[name] += getattr(micro, name)
        self._loss = loss.detach().float() if self._loss is None else self._loss + loss.detach().float()

    def end_update(self, skipped: bool, norm: torch.Tensor, scaled: bool, rate: float, scale: float) -> None:
        """Note the end of an update. A skipped one (fp16 overflow) does not move the learning-rate schedule."""
        self.updates += 1
        self.rate, self.scale = rate, scale
        self.applied += not skipped
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not (scaled and skipped):
            self._norm = norm.detach()
            self._norms = self._norm if self._norms is None else self._norms + self._norm

    def bad(self) -> bool:
        """True when a gradient norm or the loss of the window is not finite; waits for the device."""
        return not math.isfinite(self._window["loss"]) or (
            self._norms is not None and not math.isfinite(float(self._norms))
        )

    def gather(self, accelerator: Any, window_only: bool) -> dict[str, float]:
        """The window of all processes together. With ``window_only`` it goes on: the main process holds the sums, the others nothing."""
        if self._loss is not None:
            self._window["loss"] += float(self._loss)
            self._loss = None
        total = dict(self._window)
        if accelerator.num_processes > 1:
            sums = torch.tensor([self._window[n] for n in COUNTS], dtype=torch.float64, device=accelerator.device)
            total = dict(zip(COUNTS, accelerator.reduce(sums, reduction="sum").tolist(), strict=True))
        if window_only:
            self._window = total if accelerator.is_main_process else dict.fromkeys(COUNTS, 0.0)
        return total

    def window(self, accelerator: Any, clock: StepClock, work: Work) -> dict[str, Any]:
        """The values of a logged line, the same in every process, and a new window. Waits for the device."""
        device = accelerator.device
        total = self.gather(accelerator, window_only=False)
        times = clock.read()
        mine = torch.tensor([times.get(p, 0.0) for p in (*PARTS, "total")], dtype=torch.float64, device=device)
        every = accelerator.gather(mine[None]).cpu() if accelerator.num_processes > 1 else mine[None].cpu()
        seconds = float(every[:, -1].max())
        here = {n: total[n] - self._carried[n] for n in COUNTS}
        operations = work.training(*(int(here[n]) for n in ("useful", "squares", "targets", "sequences")))
        for name in COUNTS:
            self.run[name] += total[name]
        self.run["seconds"] += seconds
        self.run["operations"] += operations
        if self.warm:
            self.steady["seconds"] += seconds
            self.steady["useful"] += here["useful"]
            self.steady["sequences"] += here["sequences"]
            self.steady["data"] += times.get("data", 0.0)
            self.steady["communication"] += times.get("communication", 0.0)
            self.windows += 1
        self.warm = True
        loss = total["loss"] / max(1.0, total["targets"])
        values: dict[str, Any] = {
            "loss": loss,
            "lr": self.rate,
            "grad_norm": float(self._norm) if self._norm is not None else None,
            "loss_scale": self.scale,
            "skipped": self.skipped,
            "useful_tokens_per_s": here["useful"] / seconds,
            "sequences_per_s": here["sequences"] / seconds,
            "padding_share": 1 - total["useful"] / max(1.0, total["tokens"]),
            "update_ms": 1e3 * seconds / max(1, self.updates),
            "tflops": operations / seconds / 1e12,
        }
        values.update(_shares(every[0], seconds))
        if device.type == "cuda":
            peak = dense_tflops(torch.cuda.get_device_name(device), accelerator.mixed_precision)
            values["mfu"] = operations / seconds / 1e12 / peak / accelerator.num_processes if peak else None
            values["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        if accelerator.num_processes > 1:
            busy = every[:, PARTS.index("forward")] + every[:, PARTS.index("data")] + every[:, PARTS.index("backward")]
            values["slowest_process"] = int(busy.argmax())
            values["slowest_over_median"] = float(busy.max() / busy.median()) if float(busy.median()) > 0 else 1.0
            if self.windows:
                self.slowest.setdefault(values["slowest_process"], []).append(values["slowest_over_median"])
        self.note = f"loss {loss:.4f}"
        self.updates, self._window, self._carried = 0, dict.fromkeys(COUNTS, 0.0), dict.fromkeys(COUNTS, 0.0)
        self._norms = None
        return values

    def summary(self) -> dict[str, Any]:
        """The run's sums for the last line of stdout; memory and rates are of this process's life, its first logged window left out."""
        lived = (
            self.steady
            if self.steady["seconds"]
            else {"seconds": self.run["seconds"], "useful": self.run["useful"], "sequences": self.run["sequences"]}
        )
        per = max(lived["seconds"], 1e-9)
        memory = {"peak_host_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)}
        if torch.cuda.is_initialized():
            memory["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        return {
            **memory,
            "sequences": int(self.run["sequences"]),
            "useful_tokens": int(self.run["useful"]),
            "data_wait_share": round(self.waiting(), 4),
            "communication_share": round(self.waiting("communication"), 4),
            "training_seconds": round(self.run["seconds"], 3),
            "useful_tokens_per_s": round(lived["useful"] / per, 1),
            "sequences_per_s": round(lived["sequences"] / per, 2),
            "padding_share": round(1 - self.run["useful"] / max(1.0, self.run["tokens"]), 4),
            "loss_mean": self.run["loss"] / max(1.0, self.run["targets"]),
        }

    def waiting(self, what: str = "data") -> float:
        """Share of this process's time, its first window left out, in which it waited for ``data`` or ``communication``."""
        return self.steady[what] / self.steady["seconds"] if self.steady["seconds"] else 0.0

    def advice(self, workers: int) -> list[str]:
        """A line for each part of the run that is out of line, and what to do about it."""
        lines = []
        if (waited := self.waiting()) > MOST_WAITING:
            more = max(2, 2 * workers)
            lines.append(
                f"data: {waited:.0%} of the time went into waiting for batches; use --num-workers {more} (now {workers})"
            )
        if (waited := self.waiting("communication")) > MOST_WAITING:
            lines.append(
                f"communication: {waited:.0%} of the time went into waiting for the gradients of other processes; use a larger --batch-size, more "
                "accumulation, or --compress-gradients fp16, and see what ./inv smoke says of the links"
            )
        for process, over in sorted(self.slowest.items()):
            if len(over) > self.windows / 2 and sum(over) / len(over) > MOST_OVER:
                lines.append(
                    f"process {process} was the slowest in {len(over)} of {self.windows} windows, by {sum(over) / len(over) - 1:.0%} over the median; "
                    "./inv smoke tells whether its GPU is hot, short of power or in a slow slot"
                )
        return lines

    def state(self) -> dict[str, Any]:
        """For a checkpoint; call ``gather(window_only=True)`` first."""
        return {
            "applied": self.applied,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "updates": self.updates,
            "run": self.run,
            "window": self._window,
        }

    def restore(self, state: dict[str, Any], main: bool) -> None:
        self.applied, self.skipped, self.skipped_in_a_row = (
            state["applied"],
            state["skipped"],
            state["skipped_in_a_row"],
        )
        self.updates, self.run = state["updates"], dict(state["run"])
        self._window = dict(state["window"]) if main else dict.fromkeys(COUNTS, 0.0)
        self._carried = dict(state["window"])


def _shares(times: torch.Tensor, seconds: float) -> dict[str, float]:
    """Share of the wall time of each part, from the main process's clock."""
    parts = dict(zip(PARTS, (times[:-1] / seconds).tolist(), strict=True))
    return {f"share_{name}": round(value, 4) for name, value in parts.items()}
