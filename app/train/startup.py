"""What stands before the first update: Accelerate, signals, a line that says what runs, and where an earlier run stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from app.errors import DIVERGED, Fault
from app.hardware.cuda import bus_id
from app.hardware.gpus import numa_node
from app.train import checkpoints, record
from app.train.batches import Layout, PackedShape
from app.train.config import TrainConfig
from app.train.launch import Launch


class Signals:
    """SIGTERM and SIGINT noted, to be acted on between updates; where no launcher passes them on, a second one ends at once."""

    def __init__(self) -> None:
        self.received: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if self.received and os.environ.get("KIT_LAUNCHED") is None:
            raise KeyboardInterrupt
        self.received.append(number)

    def seen(self) -> bool:
        return bool(self.received)

    @property
    def name(self) -> str:
        return signal.Signals(self.received[0]).name if self.received else "a signal to another process"


def accelerator(config: TrainConfig, launch: Launch) -> Any:
    """The Accelerator of this process, as the config file says. Side effect: joins the process group, sets the GPU."""
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    if not hasattr(torch.cpu, "device_count"):  # torch 1.13, of which Accelerate 1.2 asks these two for gloo processes
        torch.cpu.device_count = lambda: 1
        torch.cpu.set_device = lambda device: None
    hook = DDPCommunicationHookType(config.compress_gradients)
    static = launch.accumulation == 1 and not config.global_batch_size
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=static, comm_hook=hook)
    return Accelerator(
        mixed_precision=launch.precision, cpu=launch.cpu, kwargs_handlers=[ddp], step_scheduler_with_optimizer=False
    )


def workers(config: TrainConfig, launch: Launch, device: torch.device) -> int:
    """Processes that make batches: on a GPU up to four, as cores allow; on the CPU none, the cores are busy."""
    if config.num_workers >= 0:
        return config.num_workers
    return max(1, min(4, len(os.sched_getaffinity(0)) // launch.local - 1)) if device.type == "cuda" else 0


def pin_to_numa_node(launch: Launch, device: torch.device, nodes: Path = Path("/sys/devices/system/node")) -> None:
    """Keep this process, and the workers it will start, on the CPUs beside its GPU; where there is one node, nothing changes."""
    if not launch.cpu_affinity or device.type != "cuda" or len(list(nodes.glob("node[0-9]*"))) < 2:
        return
    node = numa_node(bus_id(device.index or 0))
    if node is None:
        return
    beside = cpus_of((nodes / f"node{node}" / "cpulist").read_text()) & os.sched_getaffinity(0)
    if beside:
        os.sched_setaffinity(0, beside)


def cpus_of(text: str) -> set[int]:
    """The numbers of a kernel list such as "0-3,8"."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)}


def summary(
    device: torch.device,
    precision: str,
    layout: Layout,
    padding: str,
    shape: PackedShape | None,
    mean: float,
    epoch: int,
    total: int,
) -> str:
    """The line before the first update: devices, precision, batch, and how many updates there will be.

    ``mean`` is the mean length of a sequence: a packed row holds at least one of the longest, so a small batch may be larger than was asked.
    """
    batch = round(shape.tokens / mean) if shape else layout.batch_size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rows = f" in rows of {shape.tokens} tokens" if shape else ""
    return (
        f"{layout.processes} x {name}, {'fp32' if precision == 'no' else precision}, {padding}{rows}: "
        f"batch {batch} x accumulation {layout.accumulation} x {layout.processes} process{'es' if layout.processes > 1 else ''} "
        f"= {batch * layout.micro_batches} sequences an update{' on average' if shape else ''}, {epoch} updates an epoch, {total} in all"
    )


def earlier_layout(config: TrainConfig) -> dict[str, int]:
    """How the run that is gone on from, or used this folder before, divided its updates; empty where there is none."""
    if config.resume in ("auto", "never"):
        return dict((record.earlier_run(Path(config.output_dir)) or {}).get("layout", {}))
    folder = Path(config.resume)
    return {} if checkpoints.damage(folder) else dict(checkpoints.read_state(folder).get("layout", {}))


def earlier_state(
    config: TrainConfig, identity: dict[str, Any], say: Callable[[str], None]
) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from and its state, None to begin. Raises Fault if it is damaged or of another run."""
    output = Path(config.output_dir)
    found: Path | None
    if config.resume in ("auto", "never"):
        found = checkpoints.newest_whole(output, say)
    else:
        found = Path(config.resume)
        if wrong := checkpoints.damage(found):
            raise Fault(
                f"--resume {found}: {wrong}. Give a folder such as {output}/checkpoints/step-00000500, or --resume auto."
            )
    if found is None:
        return None
    state = checkpoints.read_state(found)
    if differing := record.differences(TrainConfig.of_then(state["identity"]), identity):
        raise Fault(
            f"{found} is of another run: {'; '.join(differing)}. Give the same options and data, or another --output-dir."
        )
    return found, state


def diverged(what: str, step: int, output: Path) -> Fault:
    """The fault that ends a run whose numbers are none any more; it names the last checkpoint from before."""
    whole = [s for s in checkpoints.steps(output) if not checkpoints.damage(checkpoints.folder_of(output, s))]
    last = (
        f"the last good checkpoint is {checkpoints.folder_of(output, whole[-1])}"
        if whole
        else "there is no checkpoint yet"
    )
    return Fault(
        f"training diverged at update {step}: {what}; {last}. Try a lower --lr, a longer --warmup-ratio, or bf16 (--accelerate ddp-bf16).",
        DIVERGED,
    )


def on_main(accelerator: Any, work: Callable[[], None]) -> None:
    """Do ``work`` in the main process while the others wait. A Fault in it ends all of them, and is told once."""
    fault = None
    if accelerator.is_main_process:
        try:
            work()
        except Fault as e:
            fault = e
    if accelerator.num_processes > 1:
        code = torch.tensor([fault.code if fault else 0], device=accelerator.device)
        torch.distributed.broadcast(code, 0)
        if not accelerator.is_main_process and code.item():
            raise SystemExit(int(code.item()))
    if fault:
        try:
            raise fault
        finally:
            del fault  # a cycle of exception and frame would keep the loader's workers alive
