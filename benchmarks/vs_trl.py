"""Stretto's GRPO beside TRL's GRPOTrainer: the same model, prompts, samples and tokens, on the same cores, in turns.

    python benchmarks/vs_trl.py [--cases short long distinct tiny] [--rounds 2] [--json PATH]

short: SmolLM2-135M, 8 prompts × 8 samples of 8 tokens a step. long: 2 × 8 samples of 64 tokens, prompts of 400.
distinct: 32 prompts × 2 samples of 8 tokens, so that prompts are hardly shared. tiny: a byte model of 2.9M parameters
in float32, 64 prompts × 8 samples of 16 tokens. No sample ends early, every group is trained on.

TRL gets an environment of its own, `.venv-trl`, the first time (some minutes), and both cores for each of its phases;
Stretto's services share them. Memory is the sum of the peaks of all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.pipeline import figures_of
from stretto.models import pull

ROOT = Path(__file__).parents[1]
TRL = ROOT / ".venv-trl"
TRL_PACKAGES = ["torch==2.13.0", "trl==1.16.0", "transformers==5.24.0", "accelerate", "datasets"]
WARM_UP = 2
"""Steps left out at the start."""
CASES: dict[str, dict[str, Any]] = {
    "short": {"prompts_per_step": 8, "samples_per_prompt": 8, "max_tokens": 8, "steps": 6},
    "long": {"prompts_per_step": 2, "samples_per_prompt": 8, "max_tokens": 64, "prompt": 400, "steps": 5},
    "distinct": {"prompts_per_step": 32, "samples_per_prompt": 2, "max_tokens": 8, "steps": 6},
    "tiny": {"prompts_per_step": 64, "samples_per_prompt": 8, "max_tokens": 16, "steps": 12},
}
"""steps: TRL's; Stretto makes twice as many, since the first ones of a pipeline are not typical."""


def environment() -> Path:
    """TRL's Python; makes its environment the first time."""
    python = TRL / "bin" / "python"
    if not (TRL / ".ready").exists():
        print(f"making {TRL} with {TRL_PACKAGES[1]}: some minutes", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(TRL)], check=True)
        for packages in (TRL_PACKAGES[:1], TRL_PACKAGES):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
        (TRL / ".ready").touch()
    return python


def tiny_model(folder: Path) -> Path:
    """A random Llama of 2.9M parameters with the byte tokenizer of `tiny`."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    tiny = pull("tiny")
    config = AutoConfig.from_pretrained(tiny)
    config.update({"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 6, "num_attention_heads": 6})
    config.update({"num_key_value_heads": 6, "head_dim": 32, "initializer_range": 0.02})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def prepared(name: str, folder: Path) -> dict[str, Any]:
    """The case with its model and its prompts on disk."""
    case = CASES[name] | {"folder": str(folder), "data": str(folder / "train.jsonl")}
    filling = "word " * case.get("prompt", 0)
    rows = [{"prompt": f"{filling}What is {a}+{b}?", "answer": str(a + b)} for a in range(40) for b in range(40)]
    Path(case["data"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny_model(folder / "model") if name == "tiny" else pull("smollm2-135m")
    return case | {"model": str(model), "dtype": "float32" if name == "tiny" else "bfloat16"}


def ours(case: dict[str, Any]) -> dict[str, float]:
    """Figures of one run of Stretto."""
    config = {
        "name": "run",
        "folder": case["folder"],
        "model": case["model"],
        "prompts_per_step": case["prompts_per_step"],
        "samples_per_prompt": case["samples_per_prompt"],
        "steps": 2 * case["steps"] + WARM_UP,
        "max_staleness": 1,
        "data": {"train": case["data"]},
        "sampling": {"max_tokens": case["max_tokens"], "ignore_eos": True},
        "reward": {"signals": [{"name": "noise", "function": f"{ROOT}/benchmarks/noise.py:noise"}]},
        "rollout": {"dtype": case["dtype"]},
        "learner": {"dtype": case["dtype"], "lr": 1e-6},
        "checkpoint": {"every": 1000},
        "broker": {"heartbeat_s": 0.5},
    }
    path = Path(case["folder"]) / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "stretto", "train", str(path), "--plain"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return figures_of(Path(case["folder"]) / "run", WARM_UP)


def theirs(case: dict[str, Any], python: Path) -> dict[str, float]:
    """Figures of one run of TRL. Activation checkpointing only where it is needed, since it costs time."""
    told = case | {
        "steps": case["steps"] + WARM_UP,
        "warm_up": WARM_UP,
        "threads": len(os.sched_getaffinity(0)),
        "accumulate": 1,
        "checkpointing": False,
    }
    done = subprocess.run(
        [str(python), str(ROOT / "benchmarks" / "trl_side.py"), json.dumps(told)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Print a line a case and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=2, help="how often both are run; the best of each counts")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    python = environment()
    figures: dict[str, Any] = {}
    print(f"{'case':10} {'':>8} {'Stretto':>10} {'TRL':>10} {'ratio':>8}")
    for name in args.cases:
        runs: dict[str, list[dict[str, float]]] = {"stretto": [], "trl": []}
        for _ in range(args.rounds):
            for who, found in runs.items():
                with tempfile.TemporaryDirectory() as folder:
                    case = prepared(name, Path(folder))
                    print(f"{name}: {who} …", file=sys.stderr, flush=True)
                    found.append(ours(case) if who == "stretto" else theirs(case, python))
        best = {who: max(found, key=lambda run: run["sequences_per_s"]) for who, found in runs.items()}
        for figure, unit in (("sequences_per_s", "seq/s"), ("peak_memory_mib", "MiB")):
            we, they = best["stretto"][figure], best["trl"][figure]
            print(f"{name:10} {unit:>8} {we:10.1f} {they:10.1f} {we / they:8.2f}", flush=True)
        figures[name] = best | {"runs": runs}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
