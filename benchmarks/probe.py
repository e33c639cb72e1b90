"""How far an engine's log-probs of the probe are from the learner's, with right weights and with subtly wrong ones.

python -m benchmarks.probe --model FOLDER [--engine vllm|embedded] [--dtype bfloat16] [--versions 8] [--json PATH]

Each version is the model with every weight moved by `step`, up or down. The engine holds it; the learner's side has it
too (right), or has parts of the version before or in the wrong place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine import config_of
from services.compute.hf import HFBackend
from services.rollout.engine import Slot, Weights
from services.rollout.service import load_engine
from shared.config import Learner
from shared.snapshot import Layout, SnapshotFile

STEPS = (3e-5, 3e-4, 3e-3)
Tensors = dict[str, torch.Tensor]


def wrong_ones(old: Tensors, new: Tensors, layers: int) -> Iterator[tuple[str, Tensors]]:
    """Sets of weights that are the new ones but for something."""
    middle = f"model.layers.{layers // 2}."
    yield "one layer of before", new | {name: t for name, t in old.items() if name.startswith(middle)}
    matrix = f"{middle}mlp.down_proj.weight"
    yield "one matrix of before", new | {matrix: old[matrix]}
    for what in ("self_attn.q_proj", "input_layernorm"):
        one, other = (f"model.layers.{number}.{what}.weight" for number in (layers // 2 - 1, layers // 2))
        yield f"two layers' {what} exchanged", new | {one: new[other], other: new[one]}


async def measure(folder: str, engine_name: str, dtype: str, versions: int) -> list[dict[str, Any]]:
    """One row a step and case: lowest and highest mean |difference| of a version, and the same of the largest."""
    backend = HFBackend.load(folder, Learner(dtype=dtype))
    model = backend._model
    probe = backend.probe_tokens(16)
    masters = {name: p.detach() for name, p in backend.parameters.items()}
    layout = Layout.of({name: tuple(t.shape) for name, t in masters.items()}, dtype)
    config = config_of(folder, engine_name)
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"dtype": dtype, "max_context": 256})}
    )
    engine = await asyncio.to_thread(load_engine, config)
    file = SnapshotFile.create(f"stretto-probe-{os.getpid()}", layout, 2)
    found: dict[tuple[float, str], list[tuple[float, float]]] = {}
    generator, version = torch.Generator().manual_seed(0), 0
    old = {name: t.to(getattr(torch, dtype)) for name, t in masters.items()}
    try:
        for step in STEPS:
            for _ in range(versions):
                version, slot = version + 1, version % 2
                new = file.tensors(slot)
                for name, t in masters.items():
                    sign = torch.randint(0, 2, t.shape, generator=generator) * 2 - 1
                    new[name].copy_(t + step * sign)
                file.seal(slot, 0, version)
                await engine.swap(Weights(0, version, new, Slot(file.path.name, slot, layout)))
                theirs = await engine.score(probe)

                def judge(case: str, step: float = step, theirs: np.ndarray = theirs) -> None:
                    differences = np.abs(theirs - backend.score(probe))
                    pair = float(differences.mean()), float(differences.max())
                    found.setdefault((step, case), []).append(pair)

                backend.use_snapshot(new)
                judge("right")
                if model.lm_head.weight is model.get_input_embeddings().weight:
                    model.lm_head.weight = torch.nn.Parameter(old["model.embed_tokens.weight"])
                    judge("tied head of before")
                for case, tensors in wrong_ones(old, new, len(model.model.layers)):
                    backend.use_snapshot(tensors)
                    judge(case)
    finally:
        await engine.close()
        file.unlink()
    rows = []
    for (step, case), pairs in found.items():
        means, largest = zip(*pairs, strict=True)
        rows.append(
            {"step": step, "case": case, "mean": (min(means), max(means)), "largest": (min(largest), max(largest))}
        )
    return rows


def main() -> None:
    """Print one table, and write the figures where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="vllm")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--versions", type=int, default=8, help="versions of each step size")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = asyncio.run(measure(args.model, args.engine, args.dtype, args.versions))
    table = Table("step", "learner's side", "mean |difference|", "largest", title=f"{args.engine}, {args.dtype}")
    for row in rows:
        ranges = (f"{low:.2g} to {high:.2g}" for low, high in (row["mean"], row["largest"]))
        table.add_row(f"{row['step']:g}", row["case"], *ranges)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
