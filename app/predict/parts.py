"""Results on disk in parts of some rows each: what is there after a kill is whole, and the rest is made when the command runs again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from app.errors import WRONG_MACHINE, Fault
from app.train.record import differences, write_json


class Parts:
    """The folder ``<output>.parts`` beside the output."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output.with_name(output.name + ".parts")
        self.parquet = output.suffix == ".parquet"

    def begin(self, identity: dict[str, Any]) -> bool:
        """Make or take up the folder; False when the output is already complete for ``identity``. Raises Fault if it is of another run."""
        told = self.output.with_name(self.output.name + ".json")
        try:
            for place, what in (
                (told, f"{self.output} is there"),
                (self.folder / "identity.json", f"{self.folder} holds parts of it"),
            ):
                if place.is_file():
                    differing = differences(json.loads(place.read_text(encoding="utf-8"))["identity"], identity)
                    if differing:
                        raise Fault(
                            f"{what}, from another run: {'; '.join(differing)}. Give another --output, or remove it."
                        )
                    if place is told and self.output.is_file():
                        return False
            if self.output.exists():
                raise Fault(
                    f"--output {self.output} is there already and was not written by this program; give another name, or remove it."
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / "identity.json", {"identity": identity})
        except OSError as e:
            raise Fault(
                f"--output {self.output} cannot be written: {e.strerror}; give another one.", WRONG_MACHINE
            ) from None
        return True

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}{self.output.suffix}"

    def write(self, number: int, rows: list[dict[str, Any]]) -> None:
        """Write one part; it is there whole or not at all."""
        making = self.path(number).with_suffix(".making")
        try:
            if self.parquet:
                import pyarrow as pa
                import pyarrow.parquet as pq

                pq.write_table(pa.Table.from_pylist(rows), making)
            else:
                with open(making, "w", encoding="utf-8") as f:
                    f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            with open(making, "rb") as f:
                os.fsync(f.fileno())
            os.replace(making, self.path(number))
        except OSError as e:
            raise Fault(
                f"{self.path(number)} could not be written: {e.strerror}. Make room and run the same command to go on.",
                WRONG_MACHINE,
            ) from None

    def join(self, count: int, identity: dict[str, Any], result: dict[str, Any]) -> None:
        """Put ``count`` parts together as the output, in order, and remove them. Raises Fault if one is missing."""
        missing = [n for n in range(count) if not self.path(n).is_file()]
        if missing:
            raise Fault(
                f"{len(missing)} of {count} parts are missing in {self.folder}, number {missing[0]} first; run the same command again.",
                WRONG_MACHINE,
            )
        making = self.output.with_name(self.output.name + ".making")
        try:
            if self.parquet:
                import pyarrow.parquet as pq

                schema = pq.read_schema(self.path(0))
                with pq.ParquetWriter(making, schema) as writer:
                    for number in range(count):
                        writer.write_table(pq.read_table(self.path(number)).cast(schema))
            else:
                with open(making, "wb") as out:
                    for number in range(count):
                        with open(self.path(number), "rb") as part:
                            shutil.copyfileobj(part, out, 1 << 22)
            with open(making, "rb") as f:
                os.fsync(f.fileno())
            os.replace(making, self.output)
        except OSError as e:
            raise Fault(
                f"{self.output} could not be written: {e.strerror}. Make room and run the same command; its parts are kept.",
                WRONG_MACHINE,
            ) from None
        write_json(self.output.with_name(self.output.name + ".json"), {"identity": identity, "result": result})
        shutil.rmtree(self.folder)
