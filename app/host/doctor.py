"""Says what of this machine stands in the way of training and which variant to build: ``./inv doctor``.

Runs on the host without torch and without Docker. Exit code 1 if anything failed. ``--record DIR`` keeps what was read,
``--from DIR`` judges such a recording on another machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from app.errors import WRONG_INPUT, Fault
from app.hardware.report import FAILED, Report, exit_code, show, timed, write_json
from app.host import doctor_docker, doctor_gpus, doctor_host, doctor_read
from app.host.variants import PINNED, ROOT, Variant, choose, variants


def examine(readings: doctor_read.Readings, known: dict[str, Variant], asked: str | None = None) -> list[Report]:
    """Every check on these readings, live or recorded; ``asked`` is the variant that the user means to use."""
    machine = readings.machine()
    gpus = len(machine.gpus)
    reports = timed(lambda: [doctor_gpus.check_driver(readings, machine)])
    choice = doctor_gpus.check_variants(machine, known, asked)
    reports.append(choice)
    reports += doctor_gpus.check_each_gpu(machine)
    reports.append(doctor_gpus.check_topology(machine))
    reports += timed(lambda: [doctor_gpus.check_fabric(readings, machine)])
    reports += timed(lambda: [doctor_gpus.check_iommu(readings, machine)])
    engine, info = doctor_docker.check_engine(readings)
    reports.append(engine)
    reports += timed(lambda: [doctor_docker.check_plugins(readings, info)])
    reports += timed(lambda: [doctor_docker.check_gpu_runtime(readings, info, gpus)])
    reports.append(doctor_host.check_cpu(readings, gpus))
    use = known.get(choice.data.get("use") or "")
    size = use.gigabytes if use else max(variant.gigabytes for variant in known.values())
    disks = doctor_host.read_disks(readings, str(info.get("DockerRootDir") or ""))
    reports.append(doctor_host.check_disks(disks, size))
    reports.append(doctor_host.check_network(readings))
    reports.append(doctor_host.check_ports(readings))
    reports += timed(lambda: [doctor_host.check_settings(readings)])
    return reports


def verdict(reports: list[Report]) -> str:
    """The last line: what to build, or the first thing to mend."""
    for report in reports:
        if report.status == FAILED:
            return f"first mend '{report.name}': {report.fix}"
    use = next((report.data.get("use") for report in reports if report.name == "variants"), None)
    return f"use ./inv build --cuda {use}" if use else "nothing stands in the way"


def diagnose(
    cuda: str | None = None,
    record: str | None = None,
    source: str | None = None,
    json_file: str | None = None,
    pinned: Path = PINNED,
) -> int:
    """Examine, print the table and the verdict, keep what was asked for; 0, or 1 if anything failed.

    Raises Fault (exit code 2) for an unknown variant or a recording that cannot be read.
    """
    known = variants(pinned)
    asked = choose(cuda, pinned).cuda if cuda else None
    readings = doctor_read.load(Path(source)) if source else doctor_read.live()
    reports = examine(readings, known, asked)
    show("doctor" + (f" on the recording {source}" if source else ""), reports)
    text = verdict(reports)
    if record:
        print(f"what was read is in {doctor_read.save(readings, Path(record))}")
    if json_file:
        write_json(Path(json_file), "doctor", text, reports)
    print(text)
    return exit_code(reports)


def smoke_arguments(gpus: str, json_file: str, sweep: bool, root: Path = ROOT) -> list[str]:
    """What ``./inv smoke`` hands to the program inside the environment.

    A JSON file must lie inside the project folder, which is what a container sees; else Fault (exit code 2).
    """
    arguments = ["--gpus", gpus] if gpus != "auto" else []
    if json_file:
        path = Path(json_file).absolute()
        if root not in path.parents:
            raise Fault(f"--json {json_file}: a container sees only {root}; give a path inside it", WRONG_INPUT)
        arguments += ["--json", str(path.relative_to(root))]
    return [*arguments, "--sweep"] if sweep else arguments


def main(arguments: list[str] | None = None) -> int:
    """The command line of ``python -m app.host.doctor``."""
    parser = argparse.ArgumentParser(prog="python -m app.host.doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cuda", help="the variant that you mean to use; default: the best for this machine")
    parser.add_argument("--record", metavar="DIR", help="keep what was read there, names and numbers masked")
    parser.add_argument("--from", dest="source", metavar="DIR", help="judge a recording instead of this machine")
    parser.add_argument("--json", metavar="FILE", help="write all reports there, for programs")
    options = parser.parse_args(arguments)
    try:
        return diagnose(options.cuda, options.record, options.source, options.json)
    except Fault as fault:
        print(f"error: {fault}", file=sys.stderr)
        return fault.code


if __name__ == "__main__":
    sys.exit(main())
