"""Knows in a minute whether this image, this driver and this machine can train: ``python -m app.smoke [--json FILE]``.

Exit code 0 when nothing failed, 1 when something did, 2 for wrong arguments. A skipped check says why. Every stage
runs in its own process group with a time limit, so this always ends by itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from app.errors import WRONG_INPUT
from app.hardware.gpus import Machine
from app.hardware.report import FAILED, SKIPPED, Report, exit_code, show, timed, write_json
from app.smoke.container import check_container
from app.smoke.cpu import check_cpu, launch_reports
from app.smoke.devices import judge_devices
from app.smoke.gpu_checks import check_gpus
from app.smoke.stage import broken


def gpus_argument(text: str) -> int | None:
    """``auto`` (whatever is there) as None, else the number of GPUs that must be there."""
    if text == "auto":
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number")
    return int(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits with 2 on a wrong one."""
    parser = argparse.ArgumentParser(prog="python -m app.smoke", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--gpus", type=gpus_argument, default=None, metavar="auto|N", help="GPUs that must be there; 0: CPU only"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all reports there, for programs")
    parser.add_argument(
        "--sweep", action="store_true", help="try NCCL settings one at a time and print their worth here"
    )
    return parser.parse_args(arguments)


def run(wanted: int | None, sweep: bool) -> list[Report]:
    """All checks; the GPU ones only where GPUs can be used."""
    prepared = check_cpu()
    facts, devices = prepared.environment.data, prepared.devices
    if devices.finished:
        gpu_reports, machine = judge_devices(devices.data, facts.get("cuda"), facts.get("architectures"), wanted)
        gpu_reports[0].seconds = gpu_reports[0].seconds or round(devices.seconds, 2)
    else:
        gpu_reports = [broken("GPUs", devices, "reboot: the driver does not answer; dmesg | grep -i nvrm")]
        machine = Machine("none")
    count = len(machine.gpus)
    container = timed(lambda: check_container(count))
    at_fault = next((report.name for report in gpu_reports if report.status == FAILED), "")
    if count and not at_fault:
        gpu_reports += check_gpus(machine, sweep)
    else:
        why = f"'{at_fault}' failed" if at_fault else "no GPU can be used here, see above"
        gpu_reports += [Report(name, SKIPPED, f"not made: {why}") for name in GPU_CHECKS]
    return [*prepared.reports, *launch_reports(prepared.launch.outcome()), *container, *gpu_reports]


#: What is skipped where no GPU can be used.
GPU_CHECKS = ("GPU compute", "GPU load", "topology", "P2P", "NCCL")


def verdict(reports: list[Report]) -> str:
    """The last line for people: whether to train here, or the first thing to mend."""
    for report in reports:
        if report.status == FAILED:
            return f"not ready. First mend '{report.name}': {report.fix}"
    return "ready to train"


def main(arguments: list[str] | None = None) -> int:
    """Run, print the table, write the JSON file; the exit code says whether anything failed."""
    options = parse(arguments)
    start = time.perf_counter()
    reports = run(options.gpus, options.sweep)
    show("smoke", reports)
    text = verdict(reports)
    print(f"{text} ({time.perf_counter() - start:.1f} s)")
    if options.json:
        try:
            write_json(options.json, "smoke", text, reports)
        except OSError as error:
            print(f"error: cannot write {options.json}: {error.strerror}; give a path that can be", file=sys.stderr)
            return WRONG_INPUT
    return exit_code(reports)


if __name__ == "__main__":
    sys.exit(main())
