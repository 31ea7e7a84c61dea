"""``python -m app.predict``: a trained BERT over files, on every GPU there is, one result a row in the order of the rows.

    python -m app.predict --model out/model --file new.csv --output out/predictions.jsonl

A run that was killed goes on where it was when the same command runs again. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.errors import STOPPED, Fault
from app.predict.config import PredictConfig, parse
from app.train.launch import run_as_program
from app.train.show import Progress, say


def main(arguments: Sequence[str]) -> int:
    """Run prediction; returns the exit code."""
    try:
        return _predict(parse(arguments), arguments)
    except Fault as fault:
        say(f"error: {fault}")
        return fault.code
    except KeyboardInterrupt:
        say("interrupted; what was written stays, the same command goes on from there")
        return STOPPED


def _predict(config: PredictConfig, arguments: Sequence[str]) -> int:
    import torch

    from app.predict import run
    from app.predict.parts import Parts
    from app.train import launch, machine, startup, store, tokenizers

    worker = launch.is_worker(os.environ)
    if worker:
        launch.die_with_parent()
    run.check_files(config.file)
    found = launch.resolve(config.accelerate, launch.visible_gpus(), os.environ)
    machine.check_early(found)
    if found.machines > 1:
        raise Fault(
            f"{found.config}: num_machines is {found.machines}; prediction runs on one machine: give each its own files."
        )
    output = Path(config.output)
    cache = store.cache_folder(output.parent, say)
    tokenizer = tokenizers.load(config.model, cache)
    parts = Parts(output)
    identity: dict[str, Any] = {
        **config.decides_results(),
        "model": _model_hash(config.model),
        "data": [store.content_hash(p) for p in config.file],
    }
    if not worker:
        if not parts.begin(identity):
            say(f"{output} is complete and nothing is left to do; give another --output to predict again")
            print(
                json.dumps(
                    json.loads(output.with_name(output.name + ".json").read_text(encoding="utf-8"))["result"],
                    ensure_ascii=False,
                )
            )
            return 0
        if found.processes > 1:
            code = launch.run_processes(found, "app.predict", arguments, say)
            return code or _finish(
                parts, identity, [json.loads(p.read_text()) for p in sorted(parts.folder.glob("counts-*.json"))]
            )
    stop = startup.Signals()
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if found.cpu else torch.device("cuda", local if worker else found.gpus[0])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        machine.check_device(device)
    loaded = run.load(config, tokenizer, device)
    if rank == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        say(f"{found.processes} x {name}, {loaded.what}, texts of at most {loaded.max_length} tokens, packed")
    with Progress("predicting", "rows", shown=rank == 0) as bar:
        counted = run.predict(config, loaded, parts, device, rank, found.processes, stop.seen, bar.advance)
    if stop.seen():
        say(f"stopped by {stop.name}; what was written stays, the same command goes on from there")
        return STOPPED
    if worker:
        (parts.folder / f"counts-{rank}.json").write_text(json.dumps(counted))
        return 0
    return _finish(parts, identity, [counted])


def _finish(parts: Any, identity: dict[str, Any], counted: list[dict[str, Any]]) -> int:
    """Join the parts, and print the result: rows and tokens that were really run, over the time of the slowest process."""
    seconds = max(c["seconds"] for c in counted)
    made, tokens = sum(c["made_rows"] for c in counted), sum(c["useful_tokens"] for c in counted)
    result = {
        "status": "done",
        "output": str(parts.output),
        "rows": counted[0]["rows"],
        "rows_predicted_now": made,
        "seconds": round(seconds, 3),
        "sequences_per_s": round(made / seconds, 1),
        "useful_tokens_per_s": round(tokens / seconds, 1),
        "processes": len(counted),
    }
    if not counted[0]["rows"]:
        raise Fault("the files hold no rows; nothing was written.")
    parts.join(counted[0]["parts"], identity, result)
    print(json.dumps(result, ensure_ascii=False), flush=True)
    return 0


def _model_hash(name: str) -> str:
    """sha256 over a model folder's configuration and weights; the name itself for one from the hub."""
    import hashlib

    from app.train.store import content_hash

    folder = Path(name)
    if not folder.is_dir():
        return name
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".bin", ".txt")):
        digest.update(path.name.encode() + content_hash(str(path)).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    run_as_program(main)
