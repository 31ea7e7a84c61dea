"""The command line is frozen: a flag that goes or changes its default is seen here."""

from __future__ import annotations

import dataclasses

import pytest

from app.errors import Fault
from app.train.config import TrainConfig, parse, parser

FLAGS = (
    "--accelerate auto --batch-size 0 --clip 1.0 --compress-gradients no --cuda-graphs auto --delimiter  --deterministic False --dropout "
    "-1.0 --encoding utf-8 --epochs 3.0 --eval-every 0 --eval-file () --eval-fraction 0.1 --fp8 False --global-batch-size 0 --keep 2 "
    "--label-column label --log-every 10 --lr 0.0 --mask-fraction 0.15 --max-length 0 --max-steps 0 --model  "
    "--num-workers -1 --on-bad-row stop --output-dir out --padding auto --resume auto --save-every 500 --seed 0 --task "
    "classify --text-column text --tokenizer  --train-file () --warmup-ratio -1.0 --weight-decay 0.01 --whole-words "
    "False"
)


def test_flags_and_defaults() -> None:
    made = sorted((a.option_strings[-1], str(a.default)) for a in parser()._actions if a.dest != "help")
    assert " ".join(f"{flag} {default}" for flag, default in made) == FLAGS


def test_every_option_has_help() -> None:
    assert all(f.metadata.get("help") for f in dataclasses.fields(TrainConfig))


def test_help_can_be_printed() -> None:
    assert "8 % slower on an H200" in " ".join(parser().format_help().split())


def test_all_faults_at_once() -> None:
    with pytest.raises(Fault) as caught:
        parse(["--batch-size", "-1", "--keep", "0", "--seed", "-1"])
    assert all(flag in str(caught.value) for flag in ("--batch-size is -1", "--keep is 0", "--seed is -1"))


def test_tab_can_be_typed() -> None:
    assert parse(["--delimiter", "\\t"]).delimiter == "\t"


def test_a_batch_is_asked_for_in_one_way() -> None:
    assert parse([]).batch_size == 32
    assert parse(["--global-batch-size", "64"]).batch_size == 0
    with pytest.raises(Fault, match="allowed is 0 beside --global-batch-size"):
        parse(["--global-batch-size", "64", "--batch-size", "8"])


def test_an_option_that_an_earlier_run_did_not_know_had_its_default() -> None:
    then = TrainConfig(lr=1e-4).decides_weights()
    del then["whole_words"]
    assert TrainConfig.of_then(then) == TrainConfig(lr=1e-4).decides_weights()
