"""The checks that need no GPU: started together, because most of their time is the import of torch."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass

from app.hardware.report import Report, passed, warning
from app.smoke.explain import explain
from app.smoke.ranks import ranks_report, run_ranks
from app.smoke.stage import Outcome, Stage, broken, module, reports_of

#: Seconds. Generous, because a cold disk and two cores make an import slow; a stage that works never comes near them.
LIMIT, QUIET = 150.0, 90.0
#: One thread each: several of these run at once.
THREADS = {"OMP_NUM_THREADS": "1"}
#: The launch is checked on the CPU whatever the machine has; NCCL between the GPUs has its own stages. The GPUs must be
#: hidden: Accelerate's barrier names a GPU by the number of the process even on the CPU.
ON_THE_CPU = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


@dataclass
class Prepared:
    """What the CPU checks found, what the GPU checks need from it, and the launch, which may still run."""

    reports: list[Report]
    environment: Outcome
    devices: Outcome
    launch: Stage


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch_command(target: str = "app.smoke.launched") -> list[str]:
    """`accelerate launch` of two processes, every question answered, so that no saved default takes part."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--main_process_port", str(free_port())),
        *("-m", target),
    ]


def check_cpu() -> Prepared:
    """Run environment, devices, data loader and accelerate together; ends after LIMIT seconds at the latest.

    Does not wait for the launch, which takes longest: the GPUs can be put to work meanwhile.
    """
    # The launcher first: it imports torch before its processes do, so it takes longest.
    launch = Stage(launch_command(), limit=LIMIT, quiet=QUIET, extra={**THREADS, **ON_THE_CPU})
    environment = Stage(module("app.smoke.environment"), limit=LIMIT, quiet=QUIET, extra=THREADS)
    loader = Stage(module("app.smoke.loader"), limit=LIMIT, quiet=QUIET, extra=THREADS)
    devices = Stage(module("app.smoke.devices"), limit=LIMIT, quiet=QUIET)
    ended = [stage.outcome() for stage in (environment, devices, loader)]
    reports = reports_of("environment", ended[0], "rebuild the environment: ./inv build --cuda V --no-cache")
    reports += reports_of("data loader", ended[2], "fewer --num-workers; more /dev/shm")
    return Prepared(reports, ended[0], ended[1], launch)


def gloo_report(seconds: float) -> Report:
    """A passed report on gloo."""
    report = passed("gloo", "2 processes: all_reduce, broadcast and all_gather, every value compared")
    report.seconds = round(seconds, 2)
    return report


def check_gloo() -> Report:
    """Two processes with gloo, without Accelerate."""
    ranks = run_ranks(module("app.smoke.gloo"), 2, limit=LIMIT, quiet=QUIET, extra=THREADS)
    if ranks.finished:
        return gloo_report(ranks.seconds)
    return ranks_report(
        "gloo",
        ranks,
        "torch.distributed cannot work between processes of this machine",
        "GLOO_SOCKET_IFNAME=lo; a resolvable host name; no firewall on the loopback interface",
    )


def launch_reports(outcome: Outcome) -> list[Report]:
    """The verdicts on gloo and on `accelerate launch` of two processes, which exchange values over gloo.

    Where the launch breaks, gloo is tried without it, so that it is clear which of the two is at fault.
    """
    name = "accelerate launch"
    if outcome.finished and outcome.data.get("world") == 2:
        told = f"2 processes on {outcome.data['device']}: gather and one averaged step equal to hand calculation"
        report = passed(name, told)
        report.seconds = round(outcome.seconds, 2)
        return [gloo_report(0.0), report]
    known = explain(outcome.output)
    gloo = check_gloo()
    if known is not None and known.name == "torchrun-python-311":
        # Known of one variant and no fault of the machine: the trainer starts its processes without torch's launcher.
        report = warning(name, "torchrun and accelerate launch do not start processes here", known.cause, known.fix)
        report.seconds = round(outcome.seconds, 2)
    else:
        report = broken(name, outcome, "read the end of its output in the JSON report; ./inv verify proves the image")
    return [gloo, report]
