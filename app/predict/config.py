"""The options of prediction: one frozen dataclass, from which the command line is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app import options
from app.options import Check, option

DESCRIPTION = (
    "Run a saved BERT over files: one result a row, in the order of the rows. Devices come from the Accelerate config."
)


@dataclass(frozen=True)
class PredictConfig:
    """Every option of ``python -m app.predict``."""

    model: str = option("out/model", "folder or hub name of a trained BERT")
    file: tuple[str, ...] = option((), "CSV, TSV, JSONL, Parquet or text files, also .gz", nargs="+", metavar="F")
    output: str = option("out/predictions.jsonl", "file to write, .jsonl or .parquet")
    what: str = option(
        "auto",
        "classes: label and probabilities; embeddings: a vector for a text; masks: the likeliest words for every [MASK]; "
        "auto: what the model was trained for",
        choices=["auto", "classes", "embeddings", "masks"],
    )
    text_column: str = option("text", "column that holds the text")
    encoding: str = option("utf-8", "encoding of CSV, JSONL and text files; a byte-order mark is removed")
    delimiter: str = option("", "column separator of CSV files; default: tab for .tsv, comma otherwise")
    max_length: int = option(0, "longest sequence in tokens; 0: as the model was trained")
    tokens: int = option(0, "tokens a packed row, the memory that prediction takes; 0: 65536 on a GPU, 4096 on the CPU")
    pooling: str = option("mean", "embeddings: mean of the tokens, or that of the first (cls)", choices=["mean", "cls"])
    top: int = option(5, "masks: how many words for each [MASK]")
    rows_a_part: int = option(4096, "rows after which results are safe on disk; a killed run goes on from there")
    accelerate: str = option(
        "auto", "Accelerate config: auto, a name in app/accelerate, or a file", metavar="NAME|FILE"
    )

    def __post_init__(self) -> None:
        """Raises one Fault that lists every option that is out of range."""
        check = Check(self)
        check.need(bool(self.file), "file", "one or more files with a text in each row")
        check.need(self.output.endswith((".jsonl", ".parquet")), "output", "a name that ends in .jsonl or .parquet")
        check.need(len(self.delimiter) <= 1 or self.delimiter == "\\t", "delimiter", "one character")
        check.need(self.max_length == 0 or self.max_length >= 4, "max_length", "0 or at least 4")
        check.need(self.tokens == 0 or self.tokens >= 512, "tokens", "0 or at least 512")
        check.need(self.top >= 1, "top", "at least 1")
        check.need(self.rows_a_part >= 1, "rows_a_part", "at least 1")
        check.done()
        if self.delimiter == "\\t":
            object.__setattr__(self, "delimiter", "\t")

    def decides_results(self) -> dict[str, Any]:
        """The options that the results depend on, as plain JSON values."""
        names = (
            "what",
            "text_column",
            "encoding",
            "delimiter",
            "max_length",
            "pooling",
            "top",
            "rows_a_part",
            "output",
        )
        return {name: getattr(self, name) for name in names}


def parse(arguments: Sequence[str]) -> PredictConfig:
    """Arguments to a checked PredictConfig; raises Fault, or SystemExit(0) after --help."""
    return options.parse(PredictConfig, "predict", DESCRIPTION, arguments)
