"""The checks that need GPUs: every card at work, then every pair, then all together, each in processes of its own."""

from __future__ import annotations

import os
from collections.abc import Set
from dataclasses import replace
from typing import Any

from app.hardware.gpus import Machine
from app.hardware.health import common_capability, slower_pcie
from app.hardware.links import peer_copy
from app.hardware.report import FAILED, PASSED, Report, failed, passed, skipped, warning
from app.hardware.topology import P2P_WORDS, PATHS
from app.smoke.nccl import LIMIT, QUIET, judge_nccl, run_collectives, size_arguments, sweep_settings
from app.smoke.nccl_log import parse_log
from app.smoke.ranks import Ranks, ranks_report
from app.smoke.stage import Stage, module, reports_of

GPU_LIMIT, GPU_QUIET = 120.0, 60.0
#: After so many pairs that hang or die the rest is not tried: each costs a whole QUIET.
PATIENCE = 2
ACS = (
    "PCIe access control (ACS) or an IOMMU sends peer traffic astray, or the driver offers P2P that does not work: "
    "switch ACS and the IOMMU off in the firmware (or iommu=pt), upgrade the driver"
)
WORKAROUND = "NCCL_P2P_DISABLE=1 trains meanwhile, through host memory and slower"


def check_gpus(machine: Machine, sweep: bool) -> list[Report]:
    """All GPU checks on the GPUs of ``machine``, which are numbered as CUDA numbers them."""
    reports = each_gpu(machine)
    n = len(machine.gpus)
    if any(report.status == FAILED for report in reports):
        why = "not made: a GPU already fails by itself"
        return [*reports, skipped("topology", why), skipped("P2P", why), skipped("NCCL", why)]
    if n == 1:
        reports.append(skipped("topology", "one GPU has no neighbour"))
        reports.append(skipped("P2P", "one GPU has no neighbour"))
        return reports + judge_nccl(machine, *run_collectives(1, size_arguments(1)))
    reports.append(topology(machine))
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    copied = copy_all(pairs)
    # One run does pairs and sizes; only where it breaks are pairs tried by themselves.
    ranks, log = run_collectives(n, [*pair_arguments(n), *size_arguments(n)])
    broken = [] if ranks.finished else collectives_of_pairs(n, ranks)
    reports += ladder(machine, pairs, copied, broken)
    if broken:
        return [*reports, skipped("NCCL", "not made: a pair of GPUs already fails")]
    reports += judge_nccl(machine, ranks, log)
    if sweep and ranks.finished:
        reports.append(sweep_settings(n, parse_log(log)))
    return reports


def pair_arguments(n: int, skip: Set[tuple[int, int]] = frozenset()) -> list[str]:
    """Arguments of ``collectives.py`` for every unordered pair of n ranks, without those in ``skip``."""
    return ["--pairs", *(f"{i}-{j}" for i in range(n) for j in range(i + 1, n) if (i, j) not in skip)]


def each_gpu(machine: Machine) -> list[Report]:
    """Kernels, products, copies and load on all GPUs at once, as in training."""
    n = len(machine.gpus)
    stages = [Stage(module("app.smoke.gpu", "--device", str(k)), limit=GPU_LIMIT, quiet=GPU_QUIET) for k in range(n)]
    reports: list[Report] = []
    for k, stage in enumerate(stages):
        reports += reports_of(
            f"GPU {k} compute", stage.outcome(), "./inv doctor on the host; another driver; dmesg | grep -i xid"
        )
    return reports


def topology(machine: Machine) -> Report:
    """The matrix between the GPUs, as NVML tells it."""
    name = "topology"
    matrix = machine.topology
    if not matrix.complete():
        return skipped(name, "NVML does not tell how all GPUs are joined", table=matrix.table())
    paths = {matrix.path(i, j) for i in range(matrix.gpus) for j in range(matrix.gpus) if i != j}
    nodes = {gpu.numa_node for gpu in machine.gpus if gpu.numa_node is not None}
    told = "; ".join(PATHS[path] for path in PATHS if path in paths)
    text = f"{matrix.gpus} GPUs joined by {told}" + (f"; NUMA nodes {sorted(nodes)}" if len(nodes) > 1 else "")
    return passed(name, f"{text}\n{matrix.table()}", cells=matrix.cells)


# ---- the ladder: topology, the driver's grant, a verified copy, a verified collective


def ladder(
    machine: Machine,
    pairs: list[tuple[int, int]],
    copied: dict[tuple[int, int], dict[str, Any]],
    broken: list[Report],
) -> list[Report]:
    """Every ordered pair up the ladder. One row if all is well, else a row for each pair that is not."""
    judged = [judge_copy(machine, pair, copied[pair]) for pair in pairs]
    reports = [report for report in judged if report.status != PASSED] + broken
    if reports:
        return reports
    rates = [copied[pair]["gbs"] for pair in pairs]
    granted = sum(bool(copied[pair]["granted"]) for pair in pairs)
    text = (
        f"{len(pairs)} ordered pairs: driver grants P2P on {granted}; every copy and all-reduce compared; "
        f"{min(rates):.1f} to {max(rates):.1f} GB/s ({judged[0].data['rule']})"
    )
    report = passed("P2P", text, pairs={f"{i}>{j}": copied[i, j] for i, j in pairs})
    report.seconds = round(sum(result.get("seconds", 0.0) for result in copied.values()), 2)
    return [report]


def copy_all(pairs: list[tuple[int, int]], device: str = "cuda:{}") -> dict[tuple[int, int], dict[str, Any]]:
    """Verified copies along all pairs. One process does many; after a hang or crash another goes on behind that pair.

    A pair's result is what ``pairs.verified_copy`` returns, or ``{"broken": words}``, or ``{"skipped": why}``.
    """
    names = {f"{device.format(i)}>{device.format(j)}": (i, j) for i, j in pairs}
    left, breaks = list(names), 0
    results: dict[tuple[int, int], dict[str, Any]] = {}
    while left:
        if breaks >= PATIENCE:
            results.update({names[name]: {"skipped": f"not tried after {breaks} broken pairs"} for name in left})
            break
        outcome = Stage(module("app.smoke.pairs", *left), limit=LIMIT, quiet=QUIET).outcome()
        done = [name for name in left if name in outcome.data]
        for name in done:
            results[names[name]] = outcome.data[name]
        if done:
            results[names[done[0]]]["seconds"] = outcome.seconds
        left = [name for name in left if name not in outcome.data]
        if outcome.finished and not left:
            break
        # The step that it stopped in is the pair to blame; before the first pair, that is the first one.
        blamed = outcome.last if outcome.last in left else left[0] if left else ""
        if not blamed:
            break
        results[names[blamed]] = {"broken": outcome.words(), "output": outcome.output[-2000:]}
        left.remove(blamed)
        breaks += 1
    return results


def judge_copy(machine: Machine, pair: tuple[int, int], result: dict[str, Any]) -> Report:
    """The verdict on one ordered pair's copy."""
    i, j = pair
    name = f"P2P {i}>{j}"
    path = machine.topology.cells[i][j] if machine.cells else ""
    grant = P2P_WORDS.get(machine.p2p[i][j], "") if machine.p2p else ""
    where = f"{path or 'path unknown'}, driver: {grant or 'grant unknown'}"
    if "skipped" in result:
        return skipped(name, f"{result['skipped']} ({where})", rule="")
    if "broken" in result:
        return failed(name, f"the copy {result['broken']} ({where})", ACS, WORKAROUND, output=result["output"], rule="")
    expected = peer_copy(
        machine.topology,
        pair,
        capability=common_capability(machine, [i, j]),
        slower_link=slower_pcie(machine, i, j),
        granted=bool(result["granted"]),
    )
    summary = (
        f"{where}, used: {'P2P' if result['granted'] else 'host memory'}, {result['gbs']:.1f} GB/s; {expected.words()}"
    )
    data = {**result, "path": path, "rule": expected.rule, "expected_gbs": expected.gbs}
    if result["wrong"]:
        return failed(
            name,
            f"{result['wrong']} of {result['elements']} values arrived wrong, first {result['first_wrong']} ({where})",
            ACS if result["granted"] else "memory or the link of one of the two GPUs corrupts data",
            WORKAROUND if result["granted"] else "swap the cards between slots to see which one it follows",
            **data,
        )
    if expected.judge(result["gbs"]) == PASSED:
        return passed(name, summary, **data)
    return warning(
        name,
        summary,
        "the path carries less than its links should",
        "slots and lanes (./inv doctor), NVLink bridge, IOMMU and ACS, load on the machine",
        **data,
    )


def collectives_of_pairs(n: int, ranks: Ranks) -> list[Report]:
    """Find the pairs whose all-reduce breaks, beginning with a run that broke; each gets a control without P2P.

    Empty when that run broke elsewhere than in a pair.
    """
    reports: list[Report] = []
    done: set[tuple[int, int]] = set()
    while not ranks.finished:
        at = ranks.outcomes[ranks.culprits()[0]].last
        pair = next(((i, j) for i in range(n) for j in range(i + 1, n) if at == f"pair {i}-{j}"), None)
        if pair is None:
            return reports
        reports.append(judge_pair(pair, ranks))
        done |= {(i, j) for i in range(n) for j in range(i + 1, n) if (i, j) <= pair}
        left = pair_arguments(n, done)
        if len(left) == 1:
            return reports
        if len(reports) >= PATIENCE:
            return [
                *reports,
                skipped("P2P collective", f"{len(left) - 1} pairs not tried after {PATIENCE} broken ones"),
            ]
        ranks, _ = run_collectives(n, left)
    return reports


def judge_pair(pair: tuple[int, int], ranks: Ranks) -> Report:
    """A pair whose collective broke: run it once more without P2P, so that the verdict is P2P or something else."""
    i, j = pair
    report = ranks_report(f"P2P collective {i}-{j}", ranks, "", "")
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return replace(
            report, cause="P2P is already off (NCCL_P2P_DISABLE=1), so it is something else", fix="dmesg, ./inv doctor"
        )
    control, _ = run_collectives(2, ["--sizes", "32", "--kinds", "all_reduce"], {"NCCL_P2P_DISABLE": "1"}, [i, j])
    if control.finished:
        return replace(
            report,
            summary=f"{report.summary}; the same all-reduce with NCCL_P2P_DISABLE=1 gives the right values",
            cause=f"P2P between GPU {i} and GPU {j} is broken. {ACS}",
            fix=WORKAROUND,
        )
    return replace(
        report,
        summary=f"{report.summary}; without P2P it breaks too: {control.words()}",
        cause="not P2P: shared memory, the driver, or one of the two GPUs",
        fix="/dev/shm above; dmesg | grep -i xid; try each GPU alone with CUDA_VISIBLE_DEVICES",
    )
