"""An engine against transformers' `generate` on the same model, alternating, one thread, best of k; and its swaps.

python -m benchmarks.engine --model FOLDER [--engine embedded|vllm] [--rounds 4] [--swaps 10] [--json PATH]
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

from services.rollout.engine import Engine, Request, Slot, Weights
from services.rollout.service import load_engine
from shared.config import RunConfig, Sampling, parse_config
from shared.snapshot import Layout, SnapshotFile


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
SWAP_WORK = Work(2, 30, 8, 250)


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


async def engine_s(engine: Engine, work: Work, vocabulary: int) -> float:
    """Seconds of the same as one request a prompt."""
    sampling = Sampling(max_tokens=work.new_tokens, ignore_eos=True)
    rows = work.rows(vocabulary)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number, row in enumerate(rows):
            tasks.create_task(engine.generate(Request(str(number), row, work.samples, sampling, number)))
    return time.perf_counter() - start


async def keep_busy(engine: Engine, vocabulary: int, enough: asyncio.Event) -> None:
    """Have samples in flight, over and over, until it is enough."""
    while not enough.is_set():
        await engine_s(engine, SWAP_WORK, vocabulary)


def config_of(folder: str, engine: str) -> RunConfig:
    """A run of which only the engine counts."""
    return parse_config(
        {
            "model": folder,
            "steps": 1,
            "prompts_per_step": 1,
            "samples_per_prompt": 2,
            "data": {"train": "none"},
            "reward": {"signals": [{"name": "s", "function": "exact_match"}]},
            "rollout": {"engine": engine, "max_context": 1024},
        }
    )


def snapshot(model: Any) -> tuple[SnapshotFile, Layout]:
    """Shared memory with the model's weights in two slots."""
    parameters = dict(model.named_parameters())
    layout = Layout.of({name: tuple(p.shape) for name, p in parameters.items()}, "bfloat16")
    file = SnapshotFile.create(f"stretto-benchmark-{os.getpid()}", layout, 2)
    for slot in (0, 1):
        for name, tensor in file.tensors(slot).items():
            tensor.copy_(parameters[name].detach())
    return file, layout


async def swap_s(engine: Engine, file: SnapshotFile, layout: Layout, version: int) -> tuple[float, float]:
    """Seconds of one swap: in which nothing was generated, and from its beginning to its end."""
    slot = version % 2
    file.seal(slot, 0, version)
    start = time.perf_counter()
    pause = await engine.swap(Weights(0, version, file.tensors(slot), Slot(file.path.name, slot, layout)))
    return pause, time.perf_counter() - start


async def measure_swaps(
    engine: Engine, file: SnapshotFile, layout: Layout, count: int, vocabulary: int
) -> dict[str, float]:
    """Times of so many swaps, one after the other, with samples in flight."""
    enough, busy, swaps = asyncio.Event(), 0, []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keep_busy(engine, vocabulary, enough))
        while not engine.stats()["samples_in_flight"]:
            await asyncio.sleep(0.01)
        for version in range(1, count + 1):
            busy += engine.stats()["samples_in_flight"] > 0
            swaps.append(await swap_s(engine, file, layout, version))
        enough.set()
    pauses, wholes = (sorted(column) for column in zip(*swaps, strict=True))
    return {
        "swaps": count,
        "swaps_with_samples_in_flight": busy,
        "pause_median_s": pauses[count // 2],
        "pause_max_s": pauses[-1],
        "swap_median_s": wholes[count // 2],
        "swap_max_s": wholes[-1],
    }


async def measure(folder: str, engine_name: str, rounds: int, swaps: int) -> dict[str, Any]:
    """Best times of each work, the two taking turns; then the swaps."""
    peer: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    peer.eval()
    engine = await asyncio.to_thread(load_engine, config_of(folder, engine_name))
    file, layout = snapshot(peer)
    try:
        await swap_s(engine, file, layout, 0)
        size, works = peer.config.vocab_size, []
        for work in WORKS:
            times = [(transformers_s(peer, work), await engine_s(engine, work, size)) for _ in range(rounds)]
            theirs, ours = (min(column) for column in zip(*times, strict=True))
            tokens = work.prompts * work.samples * work.new_tokens
            works.append({"work": str(work), "transformers_s": theirs, "engine_s": ours, "tokens_per_s": tokens / ours})
        return {"works": works} | await measure_swaps(engine, file, layout, swaps, size)
    finally:
        await engine.close()
        file.unlink()


def main() -> None:
    """Print one table, and write the figures where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--rounds", type=int, default=4, help="the best of so many rounds counts")
    parser.add_argument("--swaps", type=int, default=10, help="swaps with samples in flight")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = asyncio.run(measure(args.model, args.engine, args.rounds, args.swaps))
    table = Table("work", "generate, s", f"{args.engine}, s", "ratio", "tokens/s", title="one thread, bfloat16")
    for r in results["works"]:
        ratio = r["transformers_s"] / r["engine_s"]
        figures = (f"{r['transformers_s']:.2f}", f"{r['engine_s']:.2f}", f"{ratio:.1f}", f"{r['tokens_per_s']:.0f}")
        table.add_row(r["work"], *figures)
    Console().print(table)
    print(
        f"{results['swaps']} swaps, {results['swaps_with_samples_in_flight']} of them with "
        f"{SWAP_WORK.prompts * SWAP_WORK.samples} samples in flight: nothing generated for "
        f"{1000 * results['pause_median_s']:.1f} ms in the median, {1000 * results['pause_max_s']:.1f} ms at most; "
        f"{results['swap_median_s']:.2f} s from the call to the new weights, {results['swap_max_s']:.2f} s at most"
    )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
