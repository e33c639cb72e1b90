"""The report of a run: report.json, report.md, curves.png and timeline.png in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.broker.runlog import latest_records
from shared.errors import DataError
from stretto.live import ALGORITHM_FIGURES, algorithm_figures, duration, number
from stretto.timeline import draw_timeline, overlap_ratio, read_spans


def make_report(run_folder: Path) -> dict[str, Any]:
    """Write the report of a run and return its figures. Raises DataError where the folder holds no finished step."""
    try:
        status = json.loads((run_folder / "status.json").read_text())
        metrics, evaluations = (latest_records(run_folder / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    except OSError as error:
        raise DataError(f"{run_folder} is not the folder of a run: {error.filename} is missing") from None
    if not metrics:
        raise DataError(f"no step was finished in {run_folder}: there is nothing to report")
    spans = read_spans(run_folder)
    figures = _figures(status, metrics, evaluations) | {"overlap_ratio": overlap_ratio(spans)}
    (run_folder / "report.json").write_text(json.dumps(figures, indent=1))
    _draw_curves(metrics, evaluations, run_folder / "curves.png")
    draw_timeline(spans, run_folder / "timeline.png")
    (run_folder / "report.md").write_text(_page(figures, evaluations))
    return figures | {"folder": str(run_folder)}


def _figures(
    status: dict[str, Any], metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> dict[str, Any]:
    """Figures of the whole run; those of time from where it was last started, and rates from the first step there."""
    first, last = metrics[0], metrics[-1]
    timed = [record for record in metrics if record["time"] >= status["started"]] or [last]
    elapsed = last["time"] - timed[0]["time"]
    samples, tokens = (sum(r.get(name, 0.0) for r in timed[1:]) for name in ("train/samples", "train/tokens"))
    own = [record for record in metrics if record.get("drift/fresh/lag") == 0]
    services = [*status["services"], *status["departed"]]
    accuracies = [result["accuracy"] for result in evaluations]
    return {
        "name": status["name"],
        "state": status["state"],
        "stop_reason": status["stop_reason"],
        "steps": status["version"],
        "wall_s": last["time"] - status["started"],
        "heldout_accuracy_before": accuracies[0] if accuracies else None,
        "heldout_accuracy_after": accuracies[-1] if accuracies else None,
        "heldout_accuracy": [[result["version"], result["accuracy"]] for result in evaluations],
        "reward_first": first.get("reward/generated"),
        "reward_last": last.get("reward/generated"),
        "sequences_per_s": samples / elapsed if elapsed > 0 else None,
        "tokens_per_s": tokens / elapsed if elapsed > 0 else None,
        "step_s": elapsed / (len(timed) - 1) if len(timed) > 1 else None,
        "staleness_mean": sum(r.get("staleness/mean") or 0.0 for r in metrics) / len(metrics),
        "staleness_max": max(r.get("staleness/max") or 0.0 for r in metrics),
        "drift_mean": _mean(metrics, "drift/mean"),
        "drift_max": max(_present(metrics, "drift/max"), default=None),
        "kl_mean": _mean(metrics, "kl"),
        "drift_own_steps": len(own),
        "drift_own_mean": _mean(own, "drift/fresh/mean"),
        "drift_own_max": max(_present(own, "drift/fresh/max"), default=None),
        "drift_own_k3": _mean(own, "drift/fresh/k3"),
        "algorithm": dict(algorithm_figures(last)),
        "groups": status["groups"],
        "bottleneck": status["bottleneck"],
        "time": {service["instance"]: service["time"] for service in services},
        "peak_memory_mib": {service["instance"]: service["figures"].get("memory/peak_mib") for service in services},
    }


def _present(metrics: list[dict[str, Any]], name: str) -> list[float]:
    """A figure of the steps that have it."""
    return [record[name] for record in metrics if record.get(name) is not None]


def _mean(metrics: list[dict[str, Any]], name: str) -> float | None:
    values = _present(metrics, name)
    return sum(values) / len(values) if values else None


def _draw_curves(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    own = [name for name in ALGORITHM_FIGURES if _present(metrics, name)]
    rows = 2 + -(-len(own) // 2)
    figure = Figure(figsize=(12, 4 * rows), layout="constrained")  # pyplot's would be the caller's, too
    axes = figure.subplots(rows, 2)
    (left, right), (distance, k3) = axes[:2]
    versions = [record["version"] for record in metrics]
    rewards = [record.get("reward/generated") for record in metrics]
    left.plot(versions, rewards, color="#e76f51", alpha=0.35, linewidth=1, label="each step")
    left.plot(versions, _smooth(rewards), color="#e76f51", linewidth=2, label="mean of 10 steps")
    left.set(title="reward of the samples that were trained on", xlabel="version")
    left.legend(frameon=False)
    points = [(r["version"], r["accuracy"]) for r in evaluations if r["accuracy"] is not None]
    right.plot([v for v, _ in points], [a for _, a in points], color="#264653", marker="o", linewidth=2)
    right.set(title="accuracy on held-out prompts", xlabel="version", ylim=(-0.02, 1.02))
    _draw_drift(distance, metrics, mean=("drift/mean", "drift/fresh/mean"), largest=("drift/max", "drift/fresh/max"))
    distance.set(title="|learner − engine| of a token's log-prob, nats", xlabel="version")
    _draw_drift(k3, metrics, k3=("kl", "drift/fresh/k3"))
    k3.set(title="k3 of engine and learner, nats", xlabel="version")
    for place, name in zip(axes[2:].flat, own, strict=False):
        points = [(r["version"], r[name]) for r in metrics if r.get(name) is not None]
        place.plot([v for v, _ in points], [y for _, y in points], color="#2a9d8f", alpha=0.35, linewidth=1)
        place.plot([v for v, _ in points], _smooth([y for _, y in points]), color="#2a9d8f", linewidth=2)
        place.set(title=f"{ALGORITHM_FIGURES[name]} ({name})", xlabel="version")
    for place in axes.flat:
        place.grid(alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
        place.set_visible(place.has_data())
    figure.savefig(path, dpi=120)


def _draw_drift(axes: Any, metrics: list[dict[str, Any]], **figures: tuple[str, str]) -> None:
    """Each figure as a line of all tokens, and as dots where there were samples of the learner's own version."""
    drawn = []
    for (title, (of_all, of_fresh)), colour in zip(figures.items(), ("#2a9d8f", "#8d99ae"), strict=False):
        every = [(r["version"], r[of_all]) for r in metrics if r.get(of_all)]
        own = [(r["version"], r[of_fresh]) for r in metrics if r.get("drift/fresh/lag") == 0 and r.get(of_fresh)]
        axes.plot([v for v, _ in every], [y for _, y in every], color=colour, label=f"{title}, all tokens")
        axes.plot([v for v, _ in own], [y for _, y in own], ".", color=colour, label=f"{title}, own version")
        drawn += every + own
    if drawn:
        axes.set_yscale("log")
    axes.legend(frameon=False)


def _smooth(values: list[float | None], width: int = 10) -> list[float | None]:
    means: list[float | None] = []
    for i in range(len(values)):
        window = [v for v in values[max(0, i - width + 1) : i + 1] if v is not None]
        means.append(sum(window) / len(window) if window else None)
    return means


def _page(figures: dict[str, Any], evaluations: list[dict[str, Any]]) -> str:
    lines = [f"# {figures['name']}: {figures['state']}", "", f"{figures['stop_reason']}.", ""]
    lines += ["| figure | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in summary(figures)]
    lines += ["", "![reward and accuracy](curves.png)", "", "![timeline](timeline.png)", ""]
    lines += ["| version | accuracy | reward | answered by versions |", "|---|---|---|---|"]
    lines += [
        f"| {r['version']} | {number(r['accuracy'])} | {number(r['reward'])} | "
        f"{r['oldest_version']} to {r['newest_version']} |"
        for r in evaluations
    ]
    return "\n".join(lines) + "\n"


def summary(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures that a person wants to see, as name and text."""
    before, after = figures["heldout_accuracy_before"], figures["heldout_accuracy_after"]
    overlap = figures["overlap_ratio"]
    return [
        ("steps", f"{figures['steps']} in {duration(figures['wall_s'])}"),
        ("held-out accuracy", f"{number(before)} before, {number(after)} after"),
        ("reward", f"{number(figures['reward_first'])} first, {number(figures['reward_last'])} last"),
        ("trained a second", f"{number(figures['sequences_per_s'])} samples, {number(figures['tokens_per_s'])} tokens"),
        ("overlap", "-" if overlap is None else f"{overlap:.0%} of the learner's busy time a rollout generates"),
        ("staleness", f"{number(figures['staleness_mean'])} versions, at most {number(figures['staleness_max'])}"),
        (
            "drift",
            f"{number(figures['drift_mean'])} nats between learner and engine on average, at most "
            f"{number(figures['drift_max'])}, k3 {number(figures['kl_mean'])}",
        ),
        (
            "drift, own version",
            f"{number(figures['drift_own_mean'])} nats on average, at most {number(figures['drift_own_max'])}, k3 "
            f"{number(figures['drift_own_k3'])}, in {figures['drift_own_steps']} of {figures['steps']} steps",
        ),
        *((f"last {title}", value) for title, value in figures["algorithm"].items()),
        ("pace", figures["bottleneck"]),
    ]


def show_report(console: Console, figures: dict[str, Any]) -> None:
    """Print the summary of a report and where it is."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in summary(figures):
        table.add_row(name, value)
    console.print(table)
    console.print(f"report: {figures['folder']}/report.md", highlight=False, soft_wrap=True)
