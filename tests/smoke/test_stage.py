"""A stage always ends, and says how: finished, failed, killed, silent or too long."""

from __future__ import annotations

import os
import sys
import time

import pytest

from app.smoke.stage import Stage, broken, last_words, reports_of

BEGIN = "from app.smoke.stage import begin, mark, finish, tell; from app.hardware.report import passed\nbegin()\n"


def stage(code: str, limit: float = 30, quiet: float = 30, **extra: str) -> Stage:
    return Stage([sys.executable, "-c", BEGIN + code], limit=limit, quiet=quiet, extra=extra)


def test_a_good_stage_hands_over_reports_figures_and_marks() -> None:
    outcome = stage("mark('one'); tell(a=1); finish([passed('x', 'fine', rate_gbs=2.5)], b=[1, 2])").outcome()
    assert outcome.finished
    assert outcome.marks == ["started", "one"]
    assert outcome.data == {"a": 1, "b": [1, 2]}
    (report,) = reports_of("x", outcome, "")
    assert (report.status, report.data) == ("passed", {"rate_gbs": 2.5})
    assert report.seconds > 0


def test_a_silent_stage_is_ended_and_names_its_step() -> None:
    outcome = stage("mark('copy 0>1')\nimport time; time.sleep(3600)", quiet=1.5).outcome()
    assert not outcome.finished
    assert outcome.code is None
    assert "no progress" in outcome.words()
    assert "'copy 0>1'" in outcome.words()
    assert "time.sleep" in outcome.output or "<string>" in outcome.output  # the stack that it was asked for


def test_a_busy_stage_is_ended_at_its_limit() -> None:
    code = "import time\nwhile True: mark('tick'); time.sleep(0.05)"
    outcome = stage(code, limit=2).outcome()
    assert "longer than 2 s" in outcome.words()


@pytest.mark.parametrize("ending", ["finish()", "time.sleep(3600)"])
def test_children_of_a_stage_are_gone_however_it_ends(ending: str) -> None:
    code = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = os.fork()\nif child:\n    tell(child=child)\n    {ending}\nelse:\n    time.sleep(3600)"
    )
    outcome = stage(code, quiet=1.5).outcome()
    assert outcome.finished == (ending == "finish()")
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(outcome.data["child"], 0)
            # A killed child without a parent stays a zombie until it is collected; look at its state.
            with open(f"/proc/{outcome.data['child']}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    raise ProcessLookupError
            time.sleep(0.05)


def test_a_killed_stage_names_the_signal() -> None:
    outcome = stage("mark('load'); import os, signal; os.kill(os.getpid(), signal.SIGBUS)").outcome()
    assert "SIGBUS" in outcome.words()
    assert "'load'" in outcome.words()


def test_an_exception_is_explained() -> None:
    outcome = stage(
        "raise RuntimeError('CUDA error: no kernel image is available for execution on the device')"
    ).outcome()
    report = broken("x", outcome, "other")
    assert report.status == "failed"
    assert "RuntimeError" in report.summary
    assert "machine code" in report.cause


def test_an_unknown_exception_says_so() -> None:
    report = broken("x", stage("raise ValueError('odd')").outcome(), "do this")
    assert "ValueError: odd" in report.summary
    assert "not in the catalogue" in report.cause
    assert report.fix == "do this"


def test_reports_before_a_crash_are_kept() -> None:
    code = "from app.smoke.stage import _tell\nfinish([passed('first', 'fine')]); raise SystemExit(3)"
    reports = reports_of("second", stage(code).outcome(), "fix")
    assert [(r.name, r.status) for r in reports] == [("first", "passed"), ("second", "failed")]


def test_ending_early_without_a_report_is_no_success() -> None:
    (report,) = reports_of("x", stage("").outcome(), "fix")
    assert report.status == "failed"


def test_the_users_nccl_variables_reach_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    outcome = stage("import os; finish(nvls=os.environ['NCCL_NVLS_ENABLE'])").outcome()
    assert outcome.data == {"nvls": "0"}


def test_last_words() -> None:
    assert last_words("Traceback\n  File x\nValueError: bad\n\nwarning: later\n") == "ValueError: bad"
    assert last_words("plain\nend\n") == "end"
    assert last_words("") == ""
