"""Writes train.jsonl and heldout.jsonl: additions of two numbers from 0 to 20, 64 of the 441 pairs held out."""

from __future__ import annotations

import json
import random
from pathlib import Path

HELDOUT = 64


def main() -> None:
    """Write both files beside this one; they are always the same."""
    pairs = [(a, b) for a in range(21) for b in range(21)]
    random.Random(1).shuffle(pairs)
    for name, part in (("heldout", pairs[:HELDOUT]), ("train", pairs[HELDOUT:])):
        with (Path(__file__).parent / f"{name}.jsonl").open("w") as file:
            for a, b in part:
                row = {"prompt": f"What is {a}+{b}? Reply with the number only.", "answer": str(a + b)}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
