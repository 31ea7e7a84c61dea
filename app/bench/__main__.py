"""``python -m app.bench``: this project beside Hugging Face's Trainer, on this machine, in one run.

    python -m app.bench                    every figure: BERT-base and large on a GPU, BERT-mini on a CPU (minutes)
    python -m app.bench --json bench.json  the same, and all numbers in a file
    python -m app.bench --only mlm         one part: mlm, classify, predict, large or accuracy

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

PARTS = ("mlm", "classify", "predict", "large", "accuracy")


def main(arguments: Sequence[str]) -> int:
    """Run the chosen parts and print the tables; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m app.bench", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write all numbers to FILE, anew after every result")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts to run; default: all")
    parser.add_argument("--windows", type=int, default=5, help="measured windows of each contender (default 5)")
    options = parser.parse_args(arguments)
    if options.windows < 1:
        parser.error(f"--windows is {options.windows}, allowed is 1 or more")
    # Every contender on one GPU: with several, Hugging Face's Trainer would spread each batch over all of them.
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    import torch

    from app.bench import contenders, suites
    from app.train import record

    gpu = torch.cuda.is_available()
    began = time.monotonic()
    results: list[contenders.Result] = []
    learnt: list[dict[str, Any]] = []

    def report() -> dict[str, Any]:
        return {
            "machine": where, "matrix_tflops": round(rate / 1e12, 4), "results": [r.as_dict() for r in results],
            "figures": [f.as_dict(rate / 1e12) for f in suites.figures({r.name: r for r in results}, gpu)],
            "accuracy": learnt, "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip

    def keep() -> None:
        """After every result, so that a run that is cut short has measured something."""
        if options.json:
            record.write_json(Path(options.json), report())

    def measured(result: contenders.Result) -> None:
        results.append(result)
        print(f"{result.name}: {result.rate:,.0f} useful tokens/s", file=sys.stderr, flush=True)
        keep()

    def evaluated(row: dict[str, Any]) -> None:
        learnt.append(row)
        print(f"{row['name']}: evaluation loss {row['mean']:.4f}", file=sys.stderr, flush=True)
        keep()

    where, rate = machine(), suites.matrix_rate()
    try:
        suites.run(options.only, options.windows, gpu, measured)
        if "accuracy" in options.only:
            suites.accuracy(gpu, evaluated)
    finally:
        print(table(report()))
    print(json.dumps(report()))
    return 0


def machine() -> dict[str, Any]:
    """Where and when, and the versions that decide speed."""
    import torch

    versions = {}
    for name in ("torch", "transformers", "accelerate", "triton"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "none"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "variant": os.environ.get("KIT_VARIANT", ""),
        **versions,
    }


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    where = report["machine"]
    lines = [
        f"{where['gpu'] if where['gpu'] != 'none' else 'CPU'}, {where['cores']} cores, torch {where['torch']}, "
        f"transformers {where['transformers']}, {where['date']}",
        f"measured matrix rate {report['matrix_tflops']:.4g} TFLOP/s; useful tokens are those that are not padding; "
        "median (lowest to highest) of the windows",
        "",
        f"{'':52}{'useful tokens/s':>16}{'lowest to highest':>24}{'windows':>9}{'% of rate':>11}{'GiB':>8}{'KB a token':>12}",
    ]
    for row in report["results"]:
        share = 100 * row["useful_tflops"] / report["matrix_tflops"]
        spread = f"{row['lowest']:,} to {row['highest']:,}"
        memory = f"{row['peak_memory_gib']:>8.1f}{row['memory_bytes_a_useful_token'] / 1e3:>12.0f}"
        lines.append(
            f"{row['name']:52}{row['useful_tokens_per_s']:>16,}{spread:>24}{row['windows']:>9}"
            + (f"{share:>11.1f}" if row["useful_tflops"] else f"{'':>11}")
            + (memory if row["peak_memory_gib"] else "")
        )
    if report["figures"]:
        lines += ["", f"{'':76}{'measured':>12}{'must':>9}{'aim':>9}"]
    lines += [
        f"{row['name']:76}{row['measured']:>12,}{row['must']:>9,}{row['aim']:>9,}  {row['verdict']}"
        for row in report["figures"]
    ]
    if report["accuracy"]:
        lines += ["", f"{'evaluation loss after the same tokens':52}{'mean':>16}{'deviation':>12}   of three seeds"]
    lines += [
        f"{row['name']:52}{row['mean']:>16.4f}{row['deviation']:>12.4f}   "
        + ", ".join(f"{loss:.4f}" for loss in row["eval_losses"])
        for row in report["accuracy"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
