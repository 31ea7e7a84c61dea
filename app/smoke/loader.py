"""The DataLoader with worker processes: batches come back through /dev/shm with the right values, in order."""

from __future__ import annotations

import argparse

from app.hardware.report import passed
from app.smoke.stage import begin, finish, mark

#: A batch as the trainer makes it: 64 sequences of 512 token ids (int64) and a mask of the same shape: 0.5 MB.
ROWS, LENGTH = 64, 512


def main(arguments: list[str] | None = None) -> None:
    """Read all batches through worker processes and compare them. A worker without room in /dev/shm dies of SIGBUS."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args(arguments)
    begin()
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Numbered(Dataset):
        """Row n is n, n + 1, n + 2, ..."""

        def __len__(self) -> int:
            return ROWS * options.batches

        def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
            tokens = torch.arange(row, row + LENGTH)
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    loader = DataLoader(Numbered(), batch_size=ROWS, num_workers=options.workers, timeout=30)
    for number, batch in enumerate(loader):
        mark(f"batch {number}")
        first = torch.arange(number * ROWS, (number + 1) * ROWS).unsqueeze(1)
        expected = first + torch.arange(LENGTH)
        if not torch.equal(batch["input_ids"], expected):
            raise ValueError(f"batch {number} came back with other values than the workers were given")
    megabytes = ROWS * LENGTH * 8 * 2 / 1e6
    finish(
        [
            passed(
                "data loader",
                f"{options.batches} batches of {megabytes:.1f} MB through {options.workers} workers, values compared",
                workers=options.workers,
                batch_mb=megabytes,
            )
        ]
    )


if __name__ == "__main__":
    main()
