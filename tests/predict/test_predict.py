"""One result a row, in the order of the rows, equal to running each text alone; nothing lost when it is killed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from app.train.sample import rows


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts_file(path: Path, count: int = 50) -> list[str]:
    texts = [r["text"] for r in rows(count, seed=5)]
    texts[1], texts[-1] = "", "one word"
    with open(path, "w", newline="", encoding="utf-8") as f:
        csv.writer(f).writerows([["text"], *([t] for t in texts)])
    return texts


def alone(folder: Path, texts: list[str], kind: type, length: int = 64) -> list[torch.Tensor]:
    """Hugging Face's own forward pass, one text at a time."""
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), kind.from_pretrained(folder).eval()
    with torch.no_grad():
        return [model(**tokenizer(t, truncation=True, max_length=length, return_tensors="pt"))[0][0] for t in texts]


def test_classes_equal_each_text_alone(predict, models, tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    texts = texts_file(tmp_path / "a.csv")
    assert (
        predict("--model", models["classes"], "--file", "a.csv", "--output", "p.jsonl", "--rows-a-part", 13).code == 0
    )
    found = lines(tmp_path / "p.jsonl")
    assert [r["row"] for r in found] == list(range(len(texts)))
    for result, logits in zip(found, alone(models["classes"], texts, BertForSequenceClassification), strict=True):
        probabilities = logits.softmax(-1).tolist()
        assert list(result["probabilities"].values()) == pytest.approx(probabilities, abs=1e-5)
        assert (
            result["probability"] == max(result["probabilities"].values()) == result["probabilities"][result["label"]]
        )
    assert not (tmp_path / "p.jsonl.parts").exists()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_equal_each_text_alone(predict, models, tmp_path: Path, pooling: str) -> None:
    from transformers import BertModel

    texts = texts_file(tmp_path / "a.csv", 20)
    predict(
        "--model",
        models["classes"],
        "--file",
        "a.csv",
        "--output",
        "p.parquet",
        "--what",
        "embeddings",
        "--pooling",
        pooling,
    )
    import pyarrow.parquet as pq

    found = pq.read_table(tmp_path / "p.parquet").to_pylist()
    for result, hidden in zip(found, alone(models["classes"], texts, BertModel), strict=True):
        wanted = hidden.mean(0) if pooling == "mean" else hidden[0]
        assert result["embedding"] == pytest.approx(wanted.tolist(), abs=1e-4)


def test_masks_are_guessed_where_they_stand(predict, models, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the [MASK] of the bank and [MASK] more\nno mask here\n[MASK]\n")
    predict("--model", models["masks"], "--file", "a.txt", "--output", "p.jsonl", "--top", 3)
    found = lines(tmp_path / "p.jsonl")
    assert [len(r["masks"]) for r in found] == [2, 0, 1]
    from transformers import AutoTokenizer, BertForMaskedLM

    tokenizer, model = (
        AutoTokenizer.from_pretrained(models["masks"]),
        BertForMaskedLM.from_pretrained(models["masks"]).eval(),
    )
    given = tokenizer("[MASK]", return_tensors="pt")
    with torch.no_grad():
        best = model(**given).logits[0, 1, : len(tokenizer)].softmax(-1).topk(3)
    assert [g["token"] for g in found[2]["masks"][0]] == tokenizer.convert_ids_to_tokens(best.indices.tolist())


def test_a_mask_in_the_text_of_a_classifier_is_text(predict, models, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a [SEP] b\n")
    (tmp_path / "b.txt").write_text("a [ sep ] b\n")
    for name in "ab":
        predict("--model", models["classes"], "--file", f"{name}.txt", "--output", f"{name}.jsonl")
    assert lines(tmp_path / "a.jsonl") == lines(tmp_path / "b.jsonl")


def test_two_processes_give_the_same_file(predict, start, models, tmp_path: Path) -> None:
    texts_file(tmp_path / "a.csv")
    options = ("--model", models["classes"], "--file", "a.csv", "--rows-a-part", 8)
    predict(*options, "--output", "one.jsonl")
    child = start(*options, "--output", "two.jsonl", "--accelerate", "two-cpu")
    out, err = child.communicate(timeout=200)
    assert child.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["processes"] == 2
    for one, two in zip(lines(tmp_path / "one.jsonl"), lines(tmp_path / "two.jsonl"), strict=True):
        assert one["label"] == two["label"] and one["probability"] == pytest.approx(two["probability"], abs=1e-6)


def test_a_killed_run_goes_on_with_the_parts_that_are_missing(predict, start, models, tmp_path: Path) -> None:
    texts_file(tmp_path / "a.csv", 600)
    options = ("--model", models["classes"], "--file", "a.csv", "--rows-a-part", 2)
    child = start(*options, "--output", "killed.jsonl", "--accelerate", "cpu")
    parts = tmp_path / "killed.jsonl.parts"
    while len(list(parts.glob("part-*.jsonl"))) < 3:
        assert child.poll() is None, child.communicate()
    child.kill()
    child.communicate()
    there = len(list(parts.glob("part-*.jsonl")))
    assert 3 <= there < 300
    done = predict(*options, "--output", "killed.jsonl")
    assert json.loads(done.out.splitlines()[-1])["rows_predicted_now"] == 600 - 2 * there
    predict(*options, "--output", "whole.jsonl")
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_complete_output_is_told_and_another_is_refused(predict, models, tmp_path: Path) -> None:
    texts_file(tmp_path / "a.csv", 5)
    options = ("--model", models["classes"], "--file", "a.csv", "--output", "p.jsonl")
    first = predict(*options)
    again = predict(*options)
    assert again.code == 0 and again.out == first.out and "complete" in again.err
    other = predict(*options, "--max-length", 16)
    assert other.code == 2 and "max_length was 0, now 16" in other.err
    (tmp_path / "mine.jsonl").write_text("mine")
    mine = predict("--model", models["classes"], "--file", "a.csv", "--output", "mine.jsonl")
    assert mine.code == 2 and (tmp_path / "mine.jsonl").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--file", "none.csv"], "none.csv: no such file"),
        (["--file", "a.csv", "--text-column", "body"], "no column 'body'"),
        (["--file", "a.csv", "--what", "masks"], "gives classes, not masks"),
        (["--file", "a.csv", "--max-length", "600"], "above the 512 positions"),
        (["--file", "a.csv", "--output", "p.xlsx"], "--output is 'p.xlsx'"),
        (["--file", "empty.txt"], "hold no rows"),
        ([], "--file is ()"),
    ],
)
def test_a_sentence_and_exit_2(predict, models, tmp_path: Path, arguments: list[str], said: str) -> None:
    texts_file(tmp_path / "a.csv", 5)
    (tmp_path / "empty.txt").write_text("")
    done = predict("--model", models["classes"], *arguments)
    assert done.code == 2 and said in done.err and not done.out


def test_a_folder_that_holds_no_model(predict, tmp_path: Path) -> None:
    texts_file(tmp_path / "a.csv", 5)
    (tmp_path / "nothing").mkdir()
    done = predict("--model", "nothing", "--file", "a.csv")
    assert done.code in (2, 3) and "nothing has no usable tokenizer (it holds nothing)" in done.err
