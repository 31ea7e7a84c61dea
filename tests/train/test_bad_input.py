"""Whatever is wrong is told in one sentence, with exit 2 or 3, before anything is written that would be in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import write_rows

ROWS = "".join(json.dumps({"text": f"text number {i}", "label": "ab"[i % 2]}) + "\n" for i in range(40))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--train-file", "none.csv"], 2, "none.csv: no such file"),
        (["--train-file", "rows.jsonl", "--text-column", "body"], 2, "no key 'body'"),
        (["--train-file", "rows.jsonl", "--label-column", "class"], 2, "no key 'class'"),
        (["--train-file", "empty.csv"], 2, "empty.csv has no usable rows"),
        (["--train-file", "empty.jsonl"], 2, "empty.jsonl has no usable rows"),
        (["--train-file", "header.csv"], 2, "header.csv has no usable rows"),
        (["--train-file", "blank.txt", "--task", "mlm"], 2, "blank.txt has no usable rows (3 blank"),
        (["--train-file", "gbk.csv"], 2, "--encoding gb18030"),
        (["--train-file", "one-class.jsonl"], 2, "the one class 'a'"),
        (["--train-file", "ids.jsonl"], 2, "that is no class"),
        (["--train-file", "rows.jsonl", "--eval-file", "other-class.jsonl"], 2, "the class 'c' (1 rows) is not among"),
        (["--train-file", "rows.jsonl", "--max-length", "513"], 2, "--max-length 513 is above the 512 positions"),
        (["--train-file", "rows.jsonl", "--eval-fraction", "0.001"], 2, "leave nothing to evaluate on"),
        (["--train-file", "rows.jsonl", "--accelerate", "none.yaml"], 2, "neither a file nor one of"),
        (["--train-file", "rows.jsonl", "--accelerate", "typo.yaml"], 2, "mixed_precison (unknown)"),
        (["--train-file", "rows.jsonl", "--accelerate", "deepspeed.yaml"], 2, "deepspeed_config"),
        (["--train-file", "rows.jsonl", "--accelerate", "list.yaml"], 2, "holds no keys"),
        (["--train-file", "rows.jsonl", "--accelerate", "fp16-cpu.yaml"], 3, "fp16 needs a GPU"),
        (["--train-file", "rows.jsonl", "--model", "gpt-folder"], 2, "is a gpt2 model"),
        (["--train-file", "rows.jsonl", "--model", "empty-folder"], 2, "has no usable model configuration"),
        (["--train-file", "rows.jsonl", "--model", "someone/some-bert"], 3, "could not be had from"),
        (["--train-file", "rows.jsonl", "--output-dir", "rows.jsonl/out"], 3, "cannot be written"),
        (["--train-file", "rows.jsonl", "--output-dir", "used"], 2, "holds files that are no run (notes.txt)"),
        (["--train-file", "rows.docx"], 2, "'.docx' is none of"),
        (["--epochs", "0", "--lr", "-1", "--clip", "nan"], 2, "--epochs is 0.0"),
        (["--epochs", "0", "--lr", "-1"], 2, "--lr is -1.0"),
        (["--train-file", "rows.jsonl", "--fp8"], 2, "--fp8 goes with --padding packed and fp16"),
        (["--padding", "sideways"], 2, "invalid choice"),
        (["--no-such-option"], 2, "--no-such-option"),
        (["--eval-file", "rows.jsonl"], 2, "--eval-file"),
    ],
)
def test_a_sentence_and_an_exit_code(call, tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "header.csv").write_text("text,label\n")
    (tmp_path / "blank.txt").write_text("\n \n\n")
    (tmp_path / "gbk.csv").write_bytes("text,label\n中文,a\n英文,b\n".encode("gb18030"))
    (tmp_path / "one-class.jsonl").write_text(ROWS.replace('"b"', '"a"'))
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"text": "x", "label": i}) + "\n" for i in range(2000)))
    (tmp_path / "other-class.jsonl").write_text('{"text": "x", "label": "a"}\n{"text": "y", "label": "c"}\n')
    (tmp_path / "typo.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\nmixed_precison: fp16\n")
    (tmp_path / "deepspeed.yaml").write_text(
        "distributed_type: 'NO'\nuse_cpu: true\ndeepspeed_config: {zero_stage: 2}\n"
    )
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "fp16-cpu.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\nmixed_precision: fp16\n")
    (tmp_path / "gpt-folder").mkdir()
    (tmp_path / "gpt-folder" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    (tmp_path / "rows.docx").write_text("")
    done = call(*arguments)
    assert done.code == code, done.stderr
    assert said in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "Traceback" not in done.stderr
    assert not done.stdout
    out = tmp_path / "out"
    assert not (out / "run.json").exists() and not (out / "model").exists()


def test_the_real_program_says_the_same(run, tmp_path: Path) -> None:
    done = run("--train-file", "none.csv")
    assert done.code == 2 and done.stderr.strip().splitlines()[-1].startswith("error: none.csv: no such file")


def test_a_folder_with_another_run_is_refused_and_a_complete_one_is_told(call, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 40)
    first = call("--train-file", "rows.jsonl", "--max-steps", 2).result
    again = call("--train-file", "rows.jsonl", "--max-steps", 2)
    assert again.result == first and "complete" in again.stderr
    other = call("--train-file", "rows.jsonl", "--max-steps", 3)
    assert other.code == 2 and "already holds another run: max_steps was 2, now 3" in other.stderr
    never = call("--train-file", "rows.jsonl", "--max-steps", 2, "--resume", "never")
    assert never.code == 2 and "--resume is never" in never.stderr
    write_rows(tmp_path / "rows.jsonl", 41)
    changed = call("--train-file", "rows.jsonl", "--max-steps", 2)
    assert changed.code == 2 and "other contents of rows.jsonl" in changed.stderr


def test_a_full_disk_stops_with_older_checkpoints_whole(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full from the third checkpoint on: the run ends with 3, the second is whole, and the run goes on from it."""
    import shutil
    from collections import namedtuple

    from app.train import checkpoints

    write_rows(tmp_path / "rows.jsonl", 40)
    options = ("--train-file", "rows.jsonl", "--max-steps", 8, "--save-every", 2, "--batch-size", 4)
    usage = namedtuple("usage", "total used free")
    full = lambda path: usage(1, 1, 1 << 20) if len(checkpoints.steps(Path("out"))) >= 2 else usage(1, 0, 1 << 40)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", full)
        done = call(*options)
    assert done.code == 3 and "1 MiB are free" in done.stderr
    assert checkpoints.damage(tmp_path / "out" / "checkpoints" / "step-00000004") == ""
    assert call(*options).result["updates"] == 8


def test_a_loss_that_is_no_number_ends_with_4(call, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    done = call(
        "--train-file",
        "rows.jsonl",
        "--max-steps",
        30,
        "--lr",
        1e30,
        "--clip",
        0,
        "--log-every",
        1,
        "--warmup-ratio",
        0,
        "--save-every",
        1,
    )
    assert done.code == 4, done.stderr
    assert "training diverged at update" in done.stderr and (
        "the last good checkpoint is" in done.stderr or "no checkpoint yet" in done.stderr
    )


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("CUDA error: no kernel image is available for execution on the device", 3, "error: "),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", 3, "batch"),
        ("something that nobody has seen", 1, "not known here"),
    ],
)
def test_a_failure_inside_is_explained_where_it_is_known(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, code: int, said: str
) -> None:
    from app.train import data

    def fail(*arguments: object) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(data, "prepare", fail)
    done = call("--max-steps", 1)
    assert done.code == code and "Traceback" in done.stderr and said in done.stderr.splitlines()[-1]
