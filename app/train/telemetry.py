"""Heat, power and throttling of the GPUs while they train, sampled through NVML beside the work."""

from __future__ import annotations

from typing import Any

import torch

from app.hardware.cuda import bus_id
from app.hardware.gpus import POWER_BRAKE_BIT, THERMAL_BITS
from app.hardware.watch import Watcher

EVERY_S = 1.0  #: between two samples, which take a few milliseconds
MOST_SLOWED = 0.05  #: share of the samples from which a run names a GPU that was slowed down


class Telemetry:
    """Samples of this process's GPU; nothing on a CPU, or where NVML cannot be asked."""

    def __init__(self, device: torch.device) -> None:
        self.watcher = Watcher(bus_id(device.index or 0), EVERY_S) if device.type == "cuda" else None
        #: samples, hot ones, and ones under the power brake, of each process
        self.run: torch.Tensor | None = None

    def start(self) -> None:
        """Begin to sample, in a thread: after the loader has forked its workers, which must not inherit one at work."""
        if self.watcher:
            self.watcher.start()

    def window(self, accelerator: Any) -> dict[str, Any]:
        """What was seen since the last call, over all processes; every process must call it. Empty on a CPU."""
        if self.watcher is None:
            return {}
        samples, self.watcher.samples = self.watcher.samples, []
        heat = [s["temperature_c"] for s in samples if s["temperature_c"] is not None]
        power = [s["power_w"] for s in samples if s["power_w"] is not None]
        slowed = [s["throttle"] or 0 for s in samples]
        mine = torch.tensor(
            [
                len(samples), sum(bool(bits & THERMAL_BITS) for bits in slowed),
                sum(bool(bits & POWER_BRAKE_BIT) for bits in slowed), max(heat, default=0.0), sum(power), len(power),
            ],
            dtype=torch.float64, device=accelerator.device,
        )  # fmt: skip
        every = (accelerator.gather(mine[None]) if accelerator.num_processes > 1 else mine[None]).cpu()
        self.run = every[:, :3] if self.run is None else self.run + every[:, :3]
        taken = float(every[:, 0].sum())
        if not taken:
            return {}
        seen: dict[str, Any] = {
            "gpu_hot_share": float(every[:, 1].sum()) / taken,
            "gpu_power_brake_share": float(every[:, 2].sum()) / taken,
        }
        if float(every[:, 3].max()):
            seen["gpu_temperature_c"] = float(every[:, 3].max())
        if float(every[:, 5].sum()):
            seen["gpu_power_w"] = round(float(every[:, 4].sum() / every[:, 5].sum()), 1)
        return seen

    def stop(self) -> None:
        """End sampling."""
        if self.watcher:
            self.watcher.stop()

    def advice(self) -> list[str]:
        """A line for every GPU of the run that was slowed down for a notable part of it, and what to do."""
        lines = []
        for place, (taken, hot, braked) in enumerate(self.run.tolist() if self.run is not None else []):
            for slowed, why, fix in (
                (hot, "for heat", "mend its cooling, or lower its power limit (nvidia-smi -pl)"),
                (braked, "by the power brake", "check its power cables and the power supply"),
            ):
                if taken and slowed / taken > MOST_SLOWED:
                    share = f"in {slowed / taken:.0%} of {taken:.0f} samples"
                    lines.append(f"GPU of process {place}: slowed down {why} {share}; {fix}")
        return lines
