"""The whole of smoke: what is skipped and why, the exit code, the last line, and that a hung driver ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.hardware.gpus import Gpu, Machine
from app.hardware.report import Report, counts, exit_code, failed, passed, skipped, warning
from app.smoke import __main__ as smoke
from app.smoke import gpu_checks
from app.smoke.cpu import Prepared
from app.smoke.ranks import Ranks
from app.smoke.stage import Outcome
from tests.smoke.test_devices import gpu, nothing, reading

GOOD = Outcome(0, "", 1.0, marks=["started", "join", "leave"])


class Launch:
    """A launch that has come to its end."""

    def outcome(self) -> Outcome:
        return Outcome(0, "", 1.0, data={"world": 2, "device": "cpu:0"})


def prepared(devices: dict[str, Any] | None, hung: str = "") -> Prepared:
    environment = Outcome(0, "", 1.0, data={"cuda": "12.1", "architectures": ["sm_80", "sm_86", "sm_90"]})
    outcome = Outcome(None if hung else 0, hung, 1.0, marks=["started", "ask NVML"], data=devices or {})
    return Prepared([passed("environment", "fine")], environment, outcome, Launch())  # type: ignore[arg-type]


def run(monkeypatch: pytest.MonkeyPatch, found: Prepared, wanted: int | None = None) -> dict[str, Report]:
    monkeypatch.setattr(smoke, "check_cpu", lambda: found)
    monkeypatch.setattr(smoke, "check_container", lambda gpus: [passed("folders", "fine")])
    monkeypatch.setattr(smoke, "check_gpus", lambda machine, sweep: [passed("NCCL", f"{len(machine.gpus)} GPUs")])
    return {report.name: report for report in smoke.run(wanted, False)}


def test_without_gpus_the_gpu_checks_are_skipped_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = run(monkeypatch, prepared(nothing("NVML: NVML Shared Library Not Found")))
    assert {reports[name].status for name in smoke.GPU_CHECKS} == {"skipped"}
    assert all(reports[name].summary for name in smoke.GPU_CHECKS)
    assert exit_code([r for r in reports.values() if r.name in (*smoke.GPU_CHECKS, "GPUs", "environment")]) == 0


def test_with_gpus_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = run(monkeypatch, prepared(reading([gpu((8, 6), 0), gpu((8, 6), 1)])))
    assert reports["NCCL"].summary == "2 GPUs"


@pytest.mark.parametrize(
    ("data", "wanted", "at_fault"),
    [
        (reading([gpu((8, 6))], driver="470.161.03"), None, "driver"),
        (reading([gpu((8, 6))], error="Error 802: system not yet initialized"), None, "CUDA start"),
        (reading([gpu((8, 6))]), 4, "CUDA start"),
        (reading([gpu((12, 0))]), None, "GPU 0"),
        (nothing("NVML: Driver/library version mismatch", host=1, nodes=1), None, "GPUs"),
    ],
)
def test_a_fault_before_the_gpus_names_itself(
    monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], wanted: int | None, at_fault: str
) -> None:
    reports = run(monkeypatch, prepared(data), wanted)
    assert reports[at_fault].status == "failed"
    assert {reports[name].status for name in smoke.GPU_CHECKS} == {"skipped"}
    assert smoke.verdict(list(reports.values())).startswith(f"not ready. First mend '{at_fault}'")


def test_a_driver_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = run(monkeypatch, prepared(None, hung="made no progress for 90 s"))
    assert reports["GPUs"].status == "failed"
    assert "made no progress for 90 s in step 'ask NVML'" in reports["GPUs"].summary


def test_exit_code_and_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [passed("a", "fine", rate_gbs=1.5), skipped("b", "no GPU"), warning("c", "slow", "because", "do")]
    monkeypatch.setattr(smoke, "run", lambda wanted, sweep: found)
    file = tmp_path / "deep" / "smoke.json"
    assert smoke.main(["--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["counts"] == {"passed": 1, "failed": 0, "warning": 1, "skipped": 1}
    assert set(document["reports"][0]) == {"name", "status", "summary", "cause", "fix", "seconds", "data"}
    assert "ready to train" in capsys.readouterr().out
    found.append(failed("d", "broken", "why", "mend it"))
    assert smoke.main([]) == 1
    assert "First mend 'd': mend it" in capsys.readouterr().out
    assert smoke.main(["--json", "/proc/nowhere/x.json"]) == 2


@pytest.mark.parametrize("arguments", [["--gpus", "some"], ["--nonsense"], ["--gpus", "-1"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        smoke.parse(arguments)
    assert ended.value.code == 2


def test_skipped_is_never_passed() -> None:
    assert counts([skipped("x", "why")])["passed"] == 0


def test_one_gpu_has_no_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "each_gpu", lambda machine: [passed("GPU 0 compute", "fine")])
    monkeypatch.setattr(gpu_checks, "run_collectives", lambda n, arguments: (Ranks([GOOD], None), ""))
    one = Machine("nvml", gpus=[Gpu(0, "x")], cells=[["X"]])
    found = {report.name: report.status for report in gpu_checks.check_gpus(one, False)}
    assert found == {"GPU 0 compute": "passed", "topology": "skipped", "P2P": "skipped", "NCCL": "passed"}


def test_a_gpu_that_fails_alone_spares_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "each_gpu", lambda machine: [failed("GPU 0 compute", "wrong", "c", "f")])
    two = Machine("nvml", gpus=[Gpu(0, "x"), Gpu(1, "x")], cells=[["X", "PHB"], ["PHB", "X"]])
    found = {report.name: report.status for report in gpu_checks.check_gpus(two, False)}
    assert found == {"GPU 0 compute": "failed", "topology": "skipped", "P2P": "skipped", "NCCL": "skipped"}


def test_a_broken_pair_gets_a_control_without_p2p(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that hangs is run again with NCCL_P2P_DISABLE=1; what that gives decides the verdict."""
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    stuck = Outcome(None, "made no progress for 40 s", 40.0, marks=["started", "join", "pair 0-1"])
    first = Ranks([stuck, stuck], None)
    asked: list[Any] = []

    def runs(control: list[Outcome]) -> Any:
        def run_collectives(world: int, arguments: list[str], extra: Any = None, devices: Any = None) -> Any:
            asked.append((extra, devices))
            return Ranks(control, None), ""

        return run_collectives

    monkeypatch.setattr(gpu_checks, "run_collectives", runs([GOOD, GOOD]))
    (broken,) = gpu_checks.collectives_of_pairs(2, first)
    assert broken.name == "P2P collective 0-1"
    assert "P2P between GPU 0 and GPU 1 is broken" in broken.cause
    assert asked == [({"NCCL_P2P_DISABLE": "1"}, [0, 1])]
    monkeypatch.setattr(gpu_checks, "run_collectives", runs([stuck, stuck]))
    (other,) = gpu_checks.collectives_of_pairs(2, first)
    assert other.cause.startswith("not P2P")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    (already,) = gpu_checks.collectives_of_pairs(2, first)
    assert "already off" in already.cause


def test_two_broken_pairs_of_three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each broken pair the run goes on behind it; what was found before is kept."""
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")  # no control, so that only the search is seen

    def stuck(pair: str) -> Ranks:
        outcome = Outcome(None, "made no progress for 40 s", 40.0, marks=["started", "join", f"pair {pair}"])
        ahead = Outcome(None, "made no progress for 40 s", 40.0, marks=[*outcome.marks, "pair next"])
        return Ranks([outcome, outcome, ahead], None)

    asked: list[list[str]] = []
    runs = [stuck("1-2")]

    def run_collectives(world: int, arguments: list[str]) -> Any:
        asked.append(arguments)
        return runs.pop(0), ""

    monkeypatch.setattr(gpu_checks, "run_collectives", run_collectives)
    found = gpu_checks.collectives_of_pairs(3, stuck("0-1"))
    assert [report.name for report in found] == ["P2P collective 0-1", "P2P collective 1-2"]
    assert asked == [["--pairs", "0-2", "1-2"]]
    elsewhere = Ranks([Outcome(1, "", 1.0, marks=["started", "join", "all_reduce 1 MB"])] * 3, 0)
    assert gpu_checks.collectives_of_pairs(3, elsewhere) == []


def test_several_gpus_that_are_well(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.smoke.test_nccl import LOG_2_14, machine, ranks

    monkeypatch.setattr(gpu_checks, "each_gpu", lambda machine: [passed("GPU 0 compute", "fine")])
    two = machine(2, "PHB")
    two.p2p = [["X", "OK"], ["OK", "X"]]
    good = {"granted": True, "wrong": 0, "first_wrong": None, "elements": 9, "gbs": 25.0}
    monkeypatch.setattr(gpu_checks, "copy_all", lambda pairs: {pair: dict(good) for pair in pairs})
    monkeypatch.setattr(gpu_checks, "run_collectives", lambda n, arguments: (ranks(2, 12.0), LOG_2_14))
    found = {report.name: report for report in gpu_checks.check_gpus(two, False)}
    assert {name: report.status for name, report in found.items()} == {
        "GPU 0 compute": "passed",
        "topology": "passed",
        "P2P": "passed",
        "NCCL": "passed",
        "NCCL transport": "passed",
    }
    assert "2 ordered pairs: driver grants P2P on 2" in found["P2P"].summary
