"""Does each algorithm learn? Runs of the whole pipeline on the task of benchmarks/letters.py, over several seeds.

presets: each preset, and the critic of PPO. safe: PPO and Safe RLHF on a reward that tempts into costs. staleness:
GRPO at several `max_staleness` with each correction, two optimizer steps a version.
Runs whose results are in the JSON file are not made again, so that a stopped benchmark goes on where it was.

    python benchmarks/algorithms.py [--only presets|safe|staleness] [--presets grpo ppo] [--seeds 3] [--parallel 2]
        [--json PATH] [--figures FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import letters
from benchmarks.cells import CORRECTIONS, PRESETS, STALENESS, THRESHOLD, Cell, cells, run

PARTS = ("presets", "staleness", "safe")
RESAMPLES = 10_000
LAST = 20
"""Versions at the end of a run that its last figures are means over."""

Runs = dict[str, dict[str, Any]]


# Running


class Store:
    """The results of all runs, by the keys of their cells, in a file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self.runs: Runs = json.loads(file.read_text())["runs"] if file is not None and file.exists() else {}

    def add(self, key: str, result: dict[str, Any]) -> None:
        """Keep a result, in the file too."""
        with self._lock:
            self.runs[key] = result
            self.write({})

    def write(self, results: dict[str, Any]) -> None:
        """Write the runs, and the results that were made of them, to the file."""
        if self._file is not None:
            aside = self._file.with_suffix(".partial")
            lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(self.runs.items()))
            aside.write_text(f'{{"results": {json.dumps(results)},\n"runs": {{\n' + ",\n".join(lines) + "\n}}\n")
            aside.replace(self._file)


def run_all(todo: list[Cell], store: Store, parallel: int) -> None:
    """Make the runs, so many at once, each on one core, since threads of a tiny model only wait for each other."""
    cores = sorted(os.sched_getaffinity(0))
    places: SimpleQueue[int] = SimpleQueue()
    for i in range(parallel):
        places.put(cores[i % len(cores)])

    def one(cell: Cell) -> None:
        result = run(cell, task)
        store.add(cell.key, result)
        what = result.get("failed") or f"{np.mean(result['start']):.3f} → {np.mean(result['end']):.3f}"
        print(f"{cell.key:32} {what}", file=sys.stderr, flush=True)

    with (
        tempfile.TemporaryDirectory() as folder,
        # A thread's cores are those of the processes that it starts.
        ThreadPoolExecutor(parallel, initializer=lambda: os.sched_setaffinity(0, {places.get()})) as pool,
    ):
        task = Path(folder)
        letters.write_prompts(task)
        letters.write_model(task / "model")
        list(pool.map(one, todo))


# Figures


def gain(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Held-out reward at start and end, and a one-sided paired bootstrap of the gain over seeds and sets of letters.

    The two prompts of a set stay together, and each seed and set is drawn with replacement. p: share of the draws
    without a gain, at least 1 / 10,000; least: what the gain exceeds in 95% of them.
    """
    start, end = (np.array([run[name] for run in runs]) for name in ("start", "end"))
    gains = _draw(_by_set(end) - _by_set(start))
    means = end.mean(axis=1)
    return {
        "seeds": float(len(runs)),
        "start": float(start.mean()),
        "end": float(end.mean()),
        "end_min": float(means.min()),
        "end_max": float(means.max()),
        "gain_least": float(np.quantile(gains, 0.05)),
        "p": float(max((gains <= 0).mean(), 1 / RESAMPLES)),
        "trained": last(runs, "reward/mean"),
    }


def ratio(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, float]:
    """Final held-out reward as a share of another's, with the 5% and 95% quantiles of a bootstrap as in `gain`."""
    mine, other = (np.array([run["end"] for run in group]) for group in (runs, base))
    drawn = _draw(_by_set(mine), 1) / _draw(_by_set(other), 2)
    return {
        "ratio": float(mine.mean() / other.mean()),
        "ratio_low": float(np.quantile(drawn, 0.05)),
        "ratio_high": float(np.quantile(drawn, 0.95)),
    }


def last(runs: list[dict[str, Any]], metric: str) -> float:
    """Mean of a metric over the last versions of runs; NaN where they do not have it."""
    values = [v for run in runs for v in run["metrics"].get(metric, [])[-LAST:] if v is not None]
    return float(np.mean(values)) if values else float("nan")


def _by_set(rewards: np.ndarray) -> np.ndarray:
    """[seeds, sets] mean of the two prompts of each set."""
    return np.asarray(rewards.reshape(len(rewards), -1, 2).mean(axis=2))


def _draw(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """[RESAMPLES] means of values [seeds, sets] over drawn seeds and sets."""
    chooser = np.random.default_rng(seed)
    rows = chooser.integers(values.shape[0], size=(RESAMPLES, values.shape[0], 1))
    columns = chooser.integers(values.shape[1], size=(RESAMPLES, 1, values.shape[1]))
    return np.asarray(values[rows, columns].mean(axis=(1, 2)))


def results_of(runs: Runs) -> dict[str, Any]:
    """All figures that the runs are good for, by part."""
    found: dict[str, Any] = {"presets": {}, "staleness": {}, "safe": {}}
    good = of_names(runs)
    for (part, name), group in good.items():
        found[part][name] = gain(group)
        for figure, metric in (("explained_variance", "critic/explained_variance"), ("staleness", "staleness/mean")):
            found[part][name][figure] = last(group, metric)
    for name, figures in found["staleness"].items():
        if base := good.get(("staleness", "0-none")):
            figures |= ratio(good["staleness", name], base)
        figures["curve"] = float(np.mean([[e[1] for e in run["evaluations"]] for run in good["staleness", name]]))
    for name, figures in found["safe"].items():
        group = good["safe", name]
        figures["cost"] = last(group, "bonus")
        figures["cost_by_seed"] = [last([run], "bonus") for run in group]
        figures["multiplier"] = last(group, "algorithm/multiplier")
    return found


def of_names(runs: Runs) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The runs that did not fail by part and name, one a seed."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, result in sorted(runs.items()):
        part, name, _ = key.split("/")
        if "failed" not in result:
            found.setdefault((part, name), []).append(result)
    return found


# Tables


def show(results: dict[str, Any], runs: Runs) -> None:
    """Print the tables and the runs that failed."""
    if results["presets"] or results["safe"]:
        print("| algorithm | seeds | start | end (of seeds) | gain exceeds | p | trained | explained variance |")
        print("|---|---|---|---|---|---|---|---|")
        for name in PRESETS:
            part = "safe" if name == "safe_rlhf" else "presets"
            if f := results[part].get(name):
                print(
                    f"| {name} | {f['seeds']:.0f} | {f['start']:.3f} | {f['end']:.3f} ({f['end_min']:.3f}–"
                    f"{f['end_max']:.3f}) | {f['gain_least']:.3f} | {_p(f['p'])} | {f['trained']:.3f} | "
                    f"{_or_dash(f['explained_variance'])} |"
                )
    if results["safe"]:
        print(f"\n| algorithm | mean cost (threshold {THRESHOLD}) | of seeds | multiplier | held-out reward |")
        print("|---|---|---|---|---|")
        for name, f in results["safe"].items():
            of_seeds = ", ".join(f"{cost:.3f}" for cost in f["cost_by_seed"])
            print(f"| {name} | {f['cost']:.3f} | {of_seeds} | {_or_dash(f['multiplier'])} | {f['end']:.3f} |")
    if results["staleness"]:
        for title, cell in (
            ("final held-out reward (share of synchronous without correction, 90% interval)", _final),
            ("mean held-out reward of all evaluations", lambda f: f"{f['curve']:.3f}"),
            ("measured staleness", lambda f: f"{f['staleness']:.2f}"),
        ):
            print(f"\n{title}\n\n| max_staleness | " + " | ".join(CORRECTIONS) + " |")
            print("|---" * (len(CORRECTIONS) + 1) + "|")
            for staleness in STALENESS:
                of_row = [results["staleness"].get(f"{staleness}-{correction}") for correction in CORRECTIONS]
                print(f"| {staleness} | " + " | ".join(cell(f) if f else "–" for f in of_row) + " |")
    for key, result in sorted(runs.items()):
        if "failed" in result:
            print(f"failed: {key}: {result['failed']}")


def _final(f: dict[str, Any]) -> str:
    share = f" ({f['ratio']:.0%}, {f['ratio_low']:.0%}–{f['ratio_high']:.0%})" if "ratio" in f else ""
    return f"{f['end']:.3f}{share}"


def _p(p: float) -> str:
    return f"≤ {p:g}" if p <= 1 / RESAMPLES else f"{p:.4f}"


def _or_dash(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.3f}"


def main() -> None:
    """Make the runs that are missing, print tables, and write figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts to run")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS), help="of the part presets")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--parallel", type=int, default=2, help="runs at once")
    parser.add_argument("--json", type=Path, help="write runs and figures here, and go on from what is there")
    parser.add_argument("--figures", type=Path, help="write pictures into this folder")
    args = parser.parse_args()
    store = Store(args.json)
    wanted = [cell for part in args.only for cell in cells(part, args.seeds, args.presets)]
    todo = [cell for cell in wanted if "start" not in store.runs.get(cell.key, {})]
    print(f"{len(todo)} runs of {len(wanted)} to make", file=sys.stderr, flush=True)
    if todo:
        run_all(todo, store, args.parallel)
    results = results_of(store.runs)
    store.write(results)
    show(results, store.runs)
    if args.figures:
        from benchmarks.curves import draw

        args.figures.mkdir(parents=True, exist_ok=True)
        draw(of_names(store.runs), args.figures)


if __name__ == "__main__":
    main()
