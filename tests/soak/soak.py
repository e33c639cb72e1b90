"""Runs many steps of a model that is emulated, and checks that no service grows, opens files or starts threads.

    python tests/soak/soak.py --steps 50000 --json soak.json

All processes of a run are the real ones, with the journal on and checkpoints that prune it; only the policy is
emulated (tests/soak/emulated.py), so that a step takes milliseconds. The memory of every process, its open files and
its threads are looked at all along. The first tenth of the steps is the warm-up. What a process had in the tenth after
it is compared with what it had in the last tenth, median with median. Ends with exit status 1 where a process grew too
much. Draws the memory over the steps beside the JSON file, where matplotlib is there. tests/soak/test_soak.py runs a
short one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from shared.config import RunConfig, parse_config
from stretto.launcher import LocalRun
from stretto.models import pull

EMULATED = Path(__file__).with_name("emulated.py")
WAIT_S = 60.0
"""A run without a step for so long is taken for stuck."""
MAX_GROWTH = 0.01
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process. rss: resident bytes; uss: those of them that no other process shares.

    Only rss is judged: uss also rises where another process ends that had the same libraries open.
    """

    version: int
    rss: int
    uss: int
    files: int
    threads: int


def config_of(folder: Path, model: Path, *, steps: int) -> RunConfig:
    """A run of many small steps, which also evaluates, replaces groups and saves checkpoints."""
    for name, rows in (("train", 1000), ("heldout", 4)):
        lines = [json.dumps({"prompt": f"What is {i}+1?", "answer": str(i + 1)}) for i in range(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return parse_config(
        {
            "name": "soak",
            "folder": str(folder / "runs"),
            "model": str(model),
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "max_staleness": 2,
            "replace_equal": 1.0,
            "steps": steps,
            "data": {
                "train": str(folder / "train.jsonl"),
                "heldout": str(folder / "heldout.jsonl"),
                "chat": False,
            },
            "sampling": {"max_tokens": 16},
            "rollout": {"dtype": "float32"},
            "learner": {"dtype": "float32"},
            "reward": {"signals": [{"name": "length", "function": "length", "args": {"limit": 16, "buffer": 16}}]},
            "evaluation": {"every": 20},
            "checkpoint": {"every": 50},
            "cores": "shared",
        }
    )


@dataclass(slots=True)
class Watch:
    """Looks at the processes of a run. samples: of each instance, in the order of the steps; faults: what went wrong.

    steps_per_s: of the whole run.
    """

    run: LocalRun
    steps: int
    every: int
    show: Callable[[str], None]
    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    steps_per_s: float = 0.0

    async def watch(self) -> None:
        """Look every so many steps until the last. Raises AssertionError where the run is stuck."""
        began, version = time.monotonic(), 0
        while version + self.every < self.steps:
            wanted = version + self.every
            version = (await self.run.status(wait_version=wanted, wait_s=WAIT_S))["version"]
            assert version >= wanted, f"the run is stuck at version {version}"
            for instance, pid in self.run.pids.items():
                self.samples[instance].append(look(pid, version))
            self.steps_per_s = version / (time.monotonic() - began)
            memory = ", ".join(f"{name} {mib(seen[-1].rss):.1f}" for name, seen in self.samples.items())
            self.show(f"{version}/{self.steps} {self.steps_per_s:.0f} steps/s; MiB: {memory}")


def look(pid: int, version: int) -> Sample:
    """What a process has at a version."""
    process = psutil.Process(pid)
    with process.oneshot():
        memory = process.memory_full_info()
        return Sample(version, memory.rss, memory.uss, process.num_fds(), process.num_threads())


def mib(size_bytes: float) -> float:
    return size_bytes / 2**20


@dataclass(frozen=True, slots=True)
class Figures:
    """One process: medians of the tenth after the warm-up and of the last tenth."""

    before: Sample
    after: Sample

    @classmethod
    def of(cls, samples: list[Sample]) -> Figures:
        tenth = max(1, len(samples) // 10)
        return cls(median(samples[tenth : 2 * tenth]), median(samples[-tenth:]))

    def growth(self, name: str) -> float:
        """Of `rss` or `uss`, as a share."""
        return getattr(self.after, name) / getattr(self.before, name) - 1

    def faults(self, max_growth: float) -> list[str]:
        """What is wrong with a process that lives for weeks."""
        found = []
        if (growth := self.growth("rss")) >= max_growth:
            found.append(f"resident memory grew by {growth:.2%}")
        for name in ("files", "threads"):
            before, after = getattr(self.before, name), getattr(self.after, name)
            if before != after:
                found.append(f"{before} {name} became {after}")
        return found


def median(samples: list[Sample]) -> Sample:
    """The median of each figure by itself."""
    columns = zip(*(asdict(sample).values() for sample in samples), strict=True)
    return Sample(*(int(statistics.median(column)) for column in columns))


def verdict(samples: dict[str, list[Sample]], max_growth: float) -> list[str]:
    """One sentence for each bound that a process broke."""
    return [
        f"{instance}: {fault}" for instance, seen in samples.items() for fault in Figures.of(seen).faults(max_growth)
    ]


def table(samples: dict[str, list[Sample]]) -> list[str]:
    """Figures by process."""
    lines = [
        "| process | RSS MiB | at the end | growth | USS MiB | at the end | growth | files | threads | RSS |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for instance, seen in samples.items():
        figures = Figures.of(seen)
        cells = [instance]
        for name in ("rss", "uss"):
            sizes = (getattr(figures.before, name), getattr(figures.after, name))
            cells += [*(f"{mib(size):.2f}" for size in sizes), f"{figures.growth(name):+.2%}"]
        cells += [f"{getattr(figures.before, n)} → {getattr(figures.after, n)}" for n in ("files", "threads")]
        lines.append(f"| {' | '.join(cells)} | {sparkline([s.rss for s in seen])} |")
    return lines


def sparkline(values: list[int], width: int = 30) -> str:
    """The values as a row of bars, the lowest flat and the highest full."""
    chosen = [values[i * (len(values) - 1) // (width - 1)] for i in range(width)] if len(values) > width else values
    low, high = min(chosen), max(chosen)
    return "".join(BARS[(v - low) * (len(BARS) - 1) // max(high - low, 1)] for v in chosen)


def draw(samples: dict[str, list[Sample]], path: Path) -> None:
    """Memory over the steps, relative to that after the warm-up. Nothing where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for instance, seen in samples.items():
        base = Figures.of(seen).before.rss
        axes.plot([s.version for s in seen], [100 * (s.rss / base - 1) for s in seen], label=instance)
    axes.set(xlabel="step", ylabel="resident memory, % above that after the warm-up")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


async def soak(folder: Path, config: RunConfig, *, every: int, show: Callable[[str], None]) -> Watch:
    """A run from its first step to its last, looked at every so many steps. Raises where a service falls."""
    fallen: list[str] = []
    run = LocalRun(config, folder / "run", on_event=fallen.append, program=(sys.executable, str(EMULATED)))
    assert config.steps is not None
    watch = Watch(run, config.steps, every, show)
    await run.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run.wait())
            tasks.create_task(watch.watch())
    finally:
        await run.kill()
    assert not fallen, fallen
    status = json.loads((folder / "run" / "status.json").read_text())
    assert status["state"] == "finished", status["stop_reason"]
    return watch


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--every", type=int, help="steps between two looks; default: 200 looks in all")
    parser.add_argument("--max-growth", type=float, default=MAX_GROWTH, help="of the resident memory, as a share")
    parser.add_argument("--folder", type=Path, help="keep the run there; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    every = arguments.every or max(1, arguments.steps // 200)
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        config = config_of(folder, pull("tiny", folder / "tiny"), steps=arguments.steps)
        watch = asyncio.run(soak(folder, config, every=every, show=lambda text: print(text, flush=True)))
    print(*table(watch.samples), sep="\n")
    faults = verdict(watch.samples, arguments.max_growth)
    print(f"{arguments.steps} steps, {watch.steps_per_s:.0f} a second")
    print(*(faults or ["every process kept its bounds"]), sep="\n")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        samples = {instance: [asdict(sample) for sample in seen] for instance, seen in watch.samples.items()}
        figures = {"steps": arguments.steps, "steps_per_s": watch.steps_per_s, "faults": faults, "samples": samples}
        arguments.json.write_text(json.dumps(figures, indent=1))
        draw(watch.samples, arguments.json.with_suffix(".png"))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
