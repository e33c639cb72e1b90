"""The embedded engine against transformers' `generate` on the same model, alternating, one thread, best of k.

python -m benchmarks.engine --model FOLDER [--rounds 4] [--json PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.engine import Request
from shared.config import Sampling


@dataclass(frozen=True)
class Work:
    """prompts × samples × new tokens, no sample ends early."""

    prompts: int
    prompt_tokens: int
    samples: int
    new_tokens: int

    def rows(self, vocabulary: int) -> list[list[int]]:
        """Random prompts, always the same ones."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, vocabulary, (self.prompts, self.prompt_tokens), generator=generator).tolist()

    def __str__(self) -> str:
        return f"{self.prompts} prompts of {self.prompt_tokens} × {self.samples} samples × {self.new_tokens} tokens"


WORKS = (Work(8, 30, 8, 8), Work(1, 512, 8, 32))


def transformers_s(model: Any, work: Work) -> float:
    """Seconds of one `generate` for all prompts."""
    ids = torch.tensor(work.rows(model.config.vocab_size))
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        num_return_sequences=work.samples,
        max_new_tokens=work.new_tokens,
        min_new_tokens=work.new_tokens,
    )
    return time.perf_counter() - start


async def embedded_s(engine: EmbeddedEngine, work: Work) -> float:
    """Seconds of the same as one request a prompt."""
    sampling = Sampling(max_tokens=work.new_tokens, ignore_eos=True)
    rows = work.rows(engine.model.config.vocab_size)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number, row in enumerate(rows):
            tasks.create_task(engine.generate(Request(str(number), row, work.samples, sampling, number)))
    return time.perf_counter() - start


async def measure(folder: str, rounds: int) -> list[dict[str, Any]]:
    """Best times of each work, the two taking turns."""
    peer: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    peer.eval()
    engine = EmbeddedEngine.load(folder, dtype="bfloat16", max_samples=64, initial_version=0)
    results = []
    for work in WORKS:
        times = [(transformers_s(peer, work), await embedded_s(engine, work)) for _ in range(rounds)]
        theirs, ours = (min(column) for column in zip(*times, strict=True))
        tokens = work.prompts * work.samples * work.new_tokens
        results.append({"work": str(work), "transformers_s": theirs, "embedded_s": ours, "tokens_per_s": tokens / ours})
    await engine.close()
    return results


def main() -> None:
    """Print one table, and write the figures where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--rounds", type=int, default=4, help="the best of so many rounds counts")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = asyncio.run(measure(args.model, args.rounds))
    table = Table("work", "generate, s", "embedded, s", "ratio", "tokens/s", title="one thread, bfloat16")
    for r in results:
        ratio = r["transformers_s"] / r["embedded_s"]
        figures = (f"{r['transformers_s']:.2f}", f"{r['embedded_s']:.2f}", f"{ratio:.1f}", f"{r['tokens_per_s']:.0f}")
        table.add_row(r["work"], *figures)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
