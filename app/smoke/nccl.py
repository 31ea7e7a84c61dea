"""NCCL between all GPUs: sizes, values, bus bandwidth against what the links should give, what NCCL chose, a sweep."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.hardware.gpus import Machine
from app.hardware.health import common_capability, slowest_pcie
from app.hardware.links import all_reduce, bus_bandwidth
from app.hardware.report import FAILED, PASSED, Report, failed, passed, skipped, warning
from app.smoke.nccl_log import NcclLog, parse_log
from app.smoke.ranks import Ranks, ranks_report, run_ranks
from app.smoke.stage import module

#: Seconds that a run between GPUs may take, and that it may stay without a new step.
LIMIT, QUIET = 240.0, 40.0
SIZES_MB = (1, 16, 64, 256, 1024)
SHOWN_MB = 256
KINDS = ("all_reduce", "all_gather", "reduce_scatter")

#: Settings that --sweep tries, one at a time.
SETTINGS: tuple[tuple[str, str], ...] = (
    ("NCCL_P2P_LEVEL", "PHB"),
    ("NCCL_P2P_LEVEL", "SYS"),
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_BUFFSIZE", str(8 << 20)),
    ("NCCL_BUFFSIZE", str(16 << 20)),
    ("NCCL_ALGO", "Ring"),
    ("NCCL_ALGO", "Tree"),
    ("NCCL_PROTO", "Simple"),
    ("NCCL_MIN_NCHANNELS", "8"),
    ("NCCL_MIN_NCHANNELS", "16"),
    ("NCCL_NTHREADS", "512"),
    ("NCCL_CUMEM_ENABLE", "0"),
    ("NCCL_NVLS_ENABLE", "0"),
)


def collective_environment(folder: str) -> dict[str, str]:
    """Variables that make NCCL write its log into ``folder``. What the user has set stays as it is, always."""
    wanted = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,ENV,NET,TUNING",
        "NCCL_DEBUG_FILE": f"{folder}/nccl.%h.%p",
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def run_collectives(
    world: int, arguments: list[str], extra: dict[str, str] | None = None, devices: list[int] | None = None
) -> tuple[Ranks, str]:
    """Run ``collectives.py`` on GPUs and return how it went, with NCCL's own log of all ranks."""
    with tempfile.TemporaryDirectory(prefix="smoke-nccl-") as folder:
        each = [{"KIT_DEVICE": str(k)} for k in devices] if devices else None
        ranks = run_ranks(
            module("app.smoke.collectives", *arguments),
            world,
            limit=LIMIT,
            quiet=QUIET,
            extra={**collective_environment(folder), **(extra or {})},
            each=each,
        )
        log = "\n".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob("nccl.*")))
    if log and not ranks.finished:  # NCCL's warnings say more than torch's exception
        warnings = "\n".join(line for line in log.splitlines() if "WARN" in line or "failed" in line)[-4000:]
        culprit = ranks.culprits()[0]
        ranks.outcomes[culprit] = replace(
            ranks.outcomes[culprit], output=ranks.outcomes[culprit].output + "\n" + warnings
        )
    return ranks, log


def size_arguments(n: int) -> list[str]:
    """Arguments of ``collectives.py`` for the sizes that are measured between n GPUs."""
    return ["--sizes", *(str(size) for size in (SIZES_MB if n > 1 else (1,)))]


def judge_nccl(machine: Machine, ranks: Ranks, text: str) -> list[Report]:
    """The verdicts on collectives between all GPUs; with one GPU only that NCCL starts. ``text`` is NCCL's log."""
    if not ranks.finished:
        cause = "NCCL does not work between these GPUs"
        return [ranks_report("NCCL", ranks, cause, "NCCL_DEBUG=INFO and ./inv explain FILE on the log")]
    log = parse_log(text)
    if len(machine.gpus) == 1:
        report = passed(
            "NCCL", f"NCCL {log.version or '(version not logged)'} starts; one GPU: no bandwidth to measure"
        )
        report.seconds = round(ranks.seconds, 2)
        return [report]
    reports = [bandwidth(machine, ranks, log), transport(machine, log)]
    reports[0].seconds = round(ranks.seconds, 2)
    return reports


def measured(ranks: Ranks) -> dict[str, dict[int, float]]:
    """Bus bandwidth in GB/s by collective and size in MB. The slowest rank counts."""
    world = len(ranks.outcomes)
    found: dict[str, dict[int, float]] = {}
    for key in ranks.outcomes[0].data:
        kind, _, megabytes = key.partition(" ")
        seconds = max(outcome.data[key]["seconds"] for outcome in ranks.outcomes)
        size = ranks.outcomes[0].data[key]["bytes"]
        found.setdefault(kind, {})[int(megabytes)] = bus_bandwidth(kind, size, seconds, world)
    return found


def uses_nvls(log: NcclLog) -> bool:
    """Whether NCCL adds up in the NVLink switch: multicast is there and not switched off by the user."""
    if os.environ.get("NCCL_NVLS_ENABLE") == "0":
        return False
    return bool(log.nvls) or log.algorithm(SHOWN_MB << 20).startswith("NVLS")


def bandwidth(machine: Machine, ranks: Ranks, log: NcclLog) -> Report:
    """The verdict on the all-reduce, with all sizes beside it.

    The 256 MB are always shown. The fastest size is judged: what links should give is the limit for large messages,
    which 256 MB are not everywhere (two H200 over 18 NVLinks: 275 to 287 GB/s at 256 MB, 317 to 322 at 1024 MB).
    """
    name = "NCCL"
    rates = measured(ranks)
    members = list(range(len(machine.gpus)))
    expected = all_reduce(
        machine.topology, members, common_capability(machine, members), slowest_pcie(machine, members), uses_nvls(log)
    )
    shown = rates["all_reduce"][SHOWN_MB]
    largest, best = max(rates["all_reduce"].items(), key=lambda item: item[1])
    chose = log.algorithm(SHOWN_MB << 20)
    lines = [
        f"all-reduce of {SHOWN_MB} MB: {shown:.1f} GB/s bus bandwidth = bytes / seconds x 2(n-1)/n, n = {len(members)}"
        + (f", {chose}" if chose else ""),
        f"the fastest, {largest} MB: {best:.1f} GB/s; {expected.words()}",
    ]
    for kind in KINDS:
        lines.append(
            f"{kind}: " + ", ".join(f"{size} MB {rate:.1f}" for size, rate in sorted(rates[kind].items())) + " GB/s"
        )
    data: dict[str, Any] = {
        "busbw_gbs": {kind: {str(size): rate for size, rate in by_size.items()} for kind, by_size in rates.items()},
        "expected_gbs": expected.gbs,
        "floor_gbs": expected.floor,
        "rule": expected.rule,
        "nccl": log.version,
        "algorithm": chose,
        "nvls": uses_nvls(log),
    }
    summary = "every value compared; " + "\n".join(lines)
    status = expected.judge(best)
    if status == PASSED:
        return passed(name, summary, **data)
    make = failed if status == FAILED else warning
    return make(
        name,
        summary,
        "NCCL moves less than the links between these GPUs should carry",
        "the transport below; P2P pairs above; slots and lanes (./inv doctor); --sweep tells what settings are worth",
        **data,
    )


def transport(machine: Machine, log: NcclLog) -> Report:
    """Which way NCCL goes between ranks of one machine, from its own log."""
    name = "NCCL transport"
    if not log.transports:
        return skipped(name, "NCCL's log names no transport (NCCL_DEBUG or NCCL_DEBUG_FILE is set by the user?)")
    ways = sorted({way for found in log.transports.values() for way in found})
    off = [f"{key}={os.environ[key]}" for key in sorted(os.environ) if key.startswith("NCCL_") and "DEBUG" not in key]
    told = f"NCCL {log.version} goes by {', '.join(ways)}" + (f"; set by you: {', '.join(off)}" if off else "")
    if log.nvls is not None:
        told += f"; NVLS {'on' if uses_nvls(log) else 'off or not available'}"
    if log.network:
        told += f"; network {log.network}"
    data = {
        "transports": {f"{i}>{j}": sorted(ways) for (i, j), ways in log.transports.items()},
        "warnings": log.warnings,
    }
    if log.pairs("NET"):
        return failed(
            name,
            f"{told}; over the network inside one machine between {log.pairs('NET')}",
            "shared memory cannot be used (too small, NCCL_SHM_DISABLE, or the ranks do not share /dev/shm)",
            "one container for all ranks with enough shm_size, or ipc: host; unset NCCL_SHM_DISABLE",
            **data,
        )
    lost = [pair for pair in log.pairs("SHM") if machine.cells and machine.topology.path(*pair) == "NV"]
    if lost and os.environ.get("NCCL_P2P_DISABLE") != "1":
        return failed(
            name,
            f"{told}; NVLink joins {lost} and is not used",
            "P2P over NVLink is refused although the links are there",
            "nvidia-smi nvlink --status; P2P above; NCCL_P2P_LEVEL and NCCL_P2P_DISABLE must not be set",
            **data,
        )
    return passed(name, told, **data)


def sweep_settings(n: int, log: NcclLog) -> Report:
    """Try each setting alone on the 256 MB all-reduce and tell what it is worth against the mean of two plain runs."""
    name = "NCCL sweep"
    arguments = ["--sizes", str(SHOWN_MB), "--kinds", "all_reduce"]

    def rate(extra: dict[str, str]) -> float | None:
        ranks, _ = run_collectives(n, arguments, extra)
        return measured(ranks)["all_reduce"][SHOWN_MB] if ranks.finished else None

    plain = [rate({})]
    tried: dict[str, float | None] = {}
    left_out = []
    for variable, value in SETTINGS:
        if variable in os.environ:
            left_out.append(f"{variable} (you have set it)")
        elif variable == "NCCL_NVLS_ENABLE" and not uses_nvls(log):
            left_out.append(f"{variable} (NVLS is not in use)")
        else:
            tried[f"{variable}={value}"] = rate({variable: value})
    plain.append(rate({}))
    return judge_sweep(name, plain, tried, left_out)


def judge_sweep(name: str, plain: list[float | None], tried: dict[str, float | None], left_out: list[str]) -> Report:
    """The table of the sweep. A gain counts when it is above 5 % and twice the difference of the two plain runs."""
    known = [rate for rate in plain if rate is not None]
    if len(known) < 2:
        return failed(name, "a plain run broke in between", "NCCL is not steady here", "./inv smoke again; dmesg")
    base = sum(known) / len(known)
    noise = abs(known[0] - known[1]) / base
    lines = [f"without settings {known[0]:.1f} and {known[1]:.1f} GB/s (256 MB all-reduce)"]
    for setting, rate in sorted(tried.items(), key=lambda item: -(item[1] or 0)):
        lines.append(f"{setting}: " + (f"{rate:.1f} GB/s, {rate / base - 1:+.0%}" if rate is not None else "breaks"))
    if left_out:
        lines.append("not tried: " + ", ".join(left_out))
    gains = {s: r / base - 1 for s, r in tried.items() if r is not None and r / base - 1 > max(0.05, 2 * noise)}
    if gains:
        best = max(gains, key=lambda setting: gains[setting])
        lines.append(f"worth setting here: {best} ({gains[best]:+.0%}); measure a training run with it, too")
    else:
        lines.append("no setting is worth it here: leave NCCL alone")
    return passed(name, "\n".join(lines), plain=known, tried=tried, gains=gains)
