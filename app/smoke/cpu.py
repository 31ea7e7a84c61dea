"""The checks that need no GPU: started together, because most of their time is the import of torch."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from threading import Thread

from app.hardware.report import Report, passed
from app.smoke.ranks import Ranks, ranks_report, run_ranks
from app.smoke.stage import Outcome, Stage, broken, module, reports_of

#: Seconds. Generous, because a cold disk and two cores make an import slow; a stage that works never comes near them.
LIMIT, QUIET = 150.0, 90.0
#: One thread each: several of these run at once.
THREADS = {"OMP_NUM_THREADS": "1"}


@dataclass
class Prepared:
    """What the CPU checks found, and what the GPU checks need from it."""

    reports: list[Report]
    environment: Outcome
    devices: Outcome


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
    """Run environment, devices, data loader, gloo and accelerate together; ends after LIMIT seconds at the latest."""
    environment = Stage(module("app.smoke.environment"), limit=LIMIT, quiet=QUIET, extra=THREADS)
    devices = Stage(module("app.smoke.devices"), limit=LIMIT, quiet=QUIET)
    loader = Stage(module("app.smoke.loader"), limit=LIMIT, quiet=QUIET, extra=THREADS)
    # On the CPU whatever the machine has: this is about the launcher. NCCL between the GPUs has its own stages.
    launch = Stage(launch_command(), limit=LIMIT, quiet=QUIET, extra={**THREADS, "ACCELERATE_USE_CPU": "true"})
    found: list[Ranks] = []
    gloo = Thread(
        target=lambda: found.append(run_ranks(module("app.smoke.gloo"), 2, limit=LIMIT, quiet=QUIET, extra=THREADS))
    )
    gloo.start()
    ended = [stage.outcome() for stage in (environment, devices, loader, launch)]
    gloo.join()
    reports = reports_of("environment", ended[0], "rebuild the environment: ./inv build --cuda V --no-cache")
    reports += reports_of("data loader", ended[2], "fewer --num-workers; more /dev/shm")
    reports += [gloo_report(found[0]), launch_report(ended[3])]
    return Prepared(reports, ended[0], ended[1])


def gloo_report(ranks: Ranks) -> Report:
    """The verdict on two processes with gloo."""
    if not ranks.finished:
        return ranks_report(
            "gloo",
            ranks,
            "torch.distributed cannot work between processes of this machine",
            "GLOO_SOCKET_IFNAME=lo; a resolvable host name; no firewall on the loopback interface",
        )
    report = passed("gloo", "2 processes: all_reduce, broadcast and all_gather, every value compared")
    report.seconds = round(ranks.seconds, 2)
    return report


def launch_report(outcome: Outcome) -> Report:
    """The verdict on `accelerate launch` of two processes."""
    name = "accelerate launch"
    if not outcome.finished or outcome.data.get("world") != 2:
        report = broken(name, outcome, "read the end of its output in the JSON report; ./inv verify proves the image")
    else:
        report = passed(
            name, f"2 processes on {outcome.data['device']}: gather and one averaged step equal to hand calculation"
        )
    report.seconds = round(outcome.seconds, 2)
    return report
