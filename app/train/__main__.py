"""``python -m app.train``: train BERT.

One CPU or GPU, or as many processes as the Accelerate config asks for: the same command.

    python -m app.train                                                     the generated sample, whatever the machine has
    python -m app.train --train-file reviews.csv --model bert-base-chinese  your own data and model
    python -m app.train --task mlm --train-file corpus.txt --model bert-base --accelerate ddp-fp16-accum4
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Sequence
from pathlib import Path

from app.errors import WRONG_MACHINE, Fault
from app.smoke.explain import explain
from app.train.config import TrainConfig, parse
from app.train.launch import run_as_program
from app.train.show import say


def main(arguments: Sequence[str]) -> int:
    """Run the trainer; returns the exit code. The last line of stdout is one JSON object with the result."""
    try:
        config = parse(arguments)
        return _train(config, arguments)
    except Fault as fault:
        say(f"error: {fault}")
        return fault.code
    except KeyboardInterrupt:
        say("interrupted before there was anything to save")
        return 130
    except Exception:
        return _explained(traceback.format_exc())


def _explained(trace: str) -> int:
    """Print a traceback and, where the failure is a known one, its cause and what to do; returns the exit code."""
    say(trace)
    found = explain(trace)
    if found is None:
        say(
            "error: this failure is not known here (see the traceback); the last checkpoint is whole, the same command goes on from it"
        )
        return 1
    say(f"error: {found.cause}. {found.fix}")
    return WRONG_MACHINE


def _train(config: TrainConfig, arguments: Sequence[str]) -> int:
    from app.train import data, launch, machine, model
    from app.train.loop import Run

    worker = launch.is_worker(os.environ)
    if worker and os.environ.get("KIT_LAUNCHED"):
        launch.die_with_parent()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once by cuBLAS; needed by --deterministic
    found = launch.resolve(config.accelerate, launch.visible_gpus(), os.environ)
    machine.check_early(found)
    output = Path(config.output_dir)
    tell = say if int(os.environ.get("RANK", "0")) == 0 else (lambda line: None)
    if not worker and (finished := _look_at_folder(config, output)):
        print(json.dumps(finished, ensure_ascii=False))
        return 0
    choice = model.choose(config)
    prepared = data.prepare(config, choice.tokenizer, choice.vocabulary, choice.positions, choice.labels, tell)
    if found.processes > 1 and not worker:
        return launch.run_processes(found, "app.train", arguments, say)
    for line in data.report_lines(prepared.report, prepared.max_length):
        tell(line)
    code, result = Run(config, found, choice, prepared, tell).train()
    if result and int(os.environ.get("RANK", "0")) == 0:
        if "accuracy" in result:
            tell(
                f"accuracy {result['accuracy']:.4f} on {prepared.report['eval_rows']} held-out rows (chance {result['chance_accuracy']:.4f}, "
                f"always the largest class {result['largest_class_accuracy']:.4f})"
            )
        elif "perplexity" in result:
            known = result["frequency_loss"]
            tell(
                f"evaluation loss {result['eval_loss']:.4f} on {prepared.report['eval_rows']} held-out rows ({known:.4f} for knowing only how "
                "often each token occurs)"
            )
            if result["eval_loss"] > data.HARDLY_BETTER * known:
                tell(
                    "warning: the model makes next to no use of context; train it longer, or, if the loss has stayed where it is for long, with a "
                    "longer --warmup-ratio or a lower --lr"
                )
        if code == 0:
            tell(f"the model is in {output / 'model'}, metrics in {output / 'metrics.jsonl'}")
        print(json.dumps(result, ensure_ascii=False), flush=True)
    return code


def _look_at_folder(config: TrainConfig, output: Path) -> dict[str, object] | None:
    """Make the output folder and see whose it is; the result of a run that is complete. Raises Fault if it holds another run."""
    from app.train import record

    record.open_folder(output)
    earlier = record.earlier_run(output)
    if earlier is None:
        return None
    if config.resume == "never":
        raise Fault(
            f"--output-dir {output} already holds a run, and --resume is never; give another folder, or remove this one."
        )
    then = {k: v for k, v in TrainConfig.of_then(earlier["arguments"]).items() if k in config.decides_weights()}
    if differing := record.differences(then, config.decides_weights()):
        raise Fault(
            f"--output-dir {output} already holds another run: {'; '.join(differing)}. Give another --output-dir, or the same options to go on with it."
        )
    if earlier["status"] == "done" and config.resume == "auto":
        if record.still_there(earlier["data_files"]):
            say(f"the run in {output} is complete and nothing is left to do; give another --output-dir to train again")
            return dict(earlier["result"])
        raise Fault(
            f"--output-dir {output} holds a complete run on other contents of {', '.join(earlier['data_files'])}; give another --output-dir."
        )
    return None


if __name__ == "__main__":
    run_as_program(main)
