"""Each failure of the catalogue is recognised from a recorded text, and nothing else is made up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from app.smoke.explain import _catalogue, explain, explain_all, main

RECORDINGS = Path(__file__).parent / "recordings" / "failures"
NAMES = [failure.name for failure in _catalogue()]


def recorded(name: str) -> str:
    source, _, text = (RECORDINGS / f"{name}.txt").read_text(encoding="utf-8").partition("\n")
    assert source.startswith("# source: "), f"{name} does not say where it comes from"
    return text


def test_every_failure_has_one_recording() -> None:
    assert len(NAMES) > 50
    assert {path.stem for path in RECORDINGS.glob("*.txt")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_recording_leads_to_its_failure(name: str) -> None:
    explanation = explain(recorded(name))
    assert explanation is not None
    assert explanation.name == name
    assert explanation.line in recorded(name)


@pytest.mark.parametrize("failure", _catalogue(), ids=NAMES)
def test_cause_and_fix_are_sentences_for_people(failure) -> None:  # type: ignore[no-untyped-def]
    assert len(failure.cause) > 20
    assert len(failure.fix) > 20
    assert not failure.cause.endswith(".")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        # What torch 2.4, 2.11 and 2.13 say in a container with a /dev/shm of 1 MB (measured).
        ("RuntimeError: DataLoader worker (pid(s) 12) is killed by signal: Bus error.", "shm-dataloader"),
        (
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_9_25_1>: Resource temporarily "
            "unavailable (11)",
            "shm-dataloader",
        ),
        (
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_308_123_0>: No space left on device (28)",
            "shm-dataloader",
        ),
        ("OSError: [Errno 28] No space left on device: '/work/out/x'", "disk-full"),
        ("NCCL WARN Call to posix_fallocate failed : No space left on device", "shm-nccl"),
        ("requests.exceptions.ConnectionError: Connection reset by peer", None),
    ],
)
def test_other_wordings(text: str, name: str | None) -> None:
    explanation = explain(text)
    assert (explanation.name if explanation else None) == name


def test_a_trace_around_it_does_not_hide_it() -> None:
    noise = "\n".join(f"  File 'x.py', line {n}, in f" for n in range(2000))
    explanation = explain(noise + "\n" + recorded("duplicate-gpu") + noise)
    assert explanation is not None
    assert explanation.name == "duplicate-gpu"
    assert explanation.line.startswith("Duplicate GPU detected")


def test_the_special_comes_before_the_general() -> None:
    found = [one.name for one in explain_all(recorded("shm-nccl"))]
    assert found[0] == "shm-nccl"
    assert "nccl-system-error" in found


@pytest.mark.parametrize(
    "text", ["", "loss 2.31 step 40", "ValueError: invalid literal for int()", "NCCL INFO Connected all rings"]
)
def test_unknown_stays_unknown(text: str) -> None:
    assert explain(text) is None


def test_importing_it_is_light() -> None:
    code = "import sys, app.smoke.explain; print([m for m in ('torch', 'numpy', 'rich', 'pynvml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"\xff\xfe broken bytes\n" + recorded("cuda-804").encode())
    assert main([str(log)]) == 0
    assert "cuda-804" in capsys.readouterr().out
    log.write_text("all is well", encoding="utf-8")
    assert main([str(log)]) == 1
    assert capsys.readouterr().out.startswith("unknown")
    assert main([str(tmp_path / "missing")]) == 2
    assert "cannot read" in capsys.readouterr().err
