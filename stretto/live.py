"""What a run looks like while it goes: a live view on a terminal, one line a step elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

ALGORITHM_FIGURES = {
    "kl/reference": "KL to reference",
    "algorithm/kl_coefficient": "KL weight",
    "critic/explained_variance": "critic explains",
    "cost_critic/explained_variance": "cost critic explains",
    "cost/mean": "cost",
    "algorithm/multiplier": "λ",
    "correction/cut": "correction cuts",
}
"""Metrics that only some algorithms have, and what people call them."""

BUCKET_COLOURS = {
    "compute": "green",
    "prompts": "yellow",
    "rewards": "yellow",
    "groups": "yellow",
    "weights": "magenta",
    "room": "blue",
    "overhead": "bright_black",
}


class PlainView:
    """One readable line a step, an evaluation, a checkpoint, a warning and an event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._version = 0
        self._evaluations: list[dict[str, Any]] = []
        self._checked = False
        self._saved_version = 0
        self._warnings: list[str] = []

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, status: dict[str, Any]) -> None:
        """Print what is new in a status."""
        if not self._checked and (line := self_check_line(status)):
            self._checked = True
            self._print(line)
        for result in status["evaluations"]:
            if result not in self._evaluations:
                self._print(evaluation_line(result))
        self._evaluations = status["evaluations"]
        for record in status["history"]:
            if record["version"] > self._version:
                self._print(step_line(record, status))
                self._version = record["version"]
        if status["saved_version"] > self._saved_version:
            self._saved_version = status["saved_version"]
            self._print(f"checkpoint of version {self._saved_version} saved")
        for warning in status["warnings"]:
            if warning not in self._warnings:
                self._print(f"warning: {warning}")
        self._warnings = status["warnings"]

    def event(self, sentence: str) -> None:
        """Print a sentence."""
        self._print(sentence)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A panel that is drawn anew with each status."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._events: list[str] = []

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def update(self, status: dict[str, Any]) -> None:
        """Draw a status."""
        self._live.update(draw(status, self._events[-4:]))

    def event(self, sentence: str) -> None:
        """Show a sentence below the panel."""
        self._events.append(sentence)


def console_here(*, quiet: bool = False) -> Console:
    """A console for plain lines in a notebook too, which says that it is a terminal."""
    is_notebook = Console().is_jupyter
    return Console(quiet=quiet, force_jupyter=False, force_terminal=False if is_notebook else None)


def step_line(record: dict[str, Any], status: dict[str, Any]) -> str:
    """One step in one line."""
    parts = [
        f"step {record['version']}/{status['steps']}",
        f"reward {number(record.get('reward/generated'))}",
        f"loss {number(record.get('loss'))}",
        f"kl {number(record.get('kl'))}",
        f"drift {drift(record)}",
        f"freshest {fresh_drift(record)}",
        f"staleness {number(record.get('staleness/mean'))} (max {number(record.get('staleness/max'))})",
        f"groups trained {number(record.get('train/groups'))}",
        *(f"{title} {value}" for title, value in algorithm_figures(record)),
        f"{number(status['sequences_per_s'])} samples/s",
        f"left {duration(status['eta_s'])}",
    ]
    return "  ".join(parts)


def evaluation_line(result: dict[str, Any]) -> str:
    """One evaluation in one line."""
    return (
        f"evaluation at version {result['version']}: accuracy {number(result['accuracy'])}, reward "
        f"{number(result['reward'])} ({result['scored']} of {result['prompts']} prompts scored)"
    )


def self_check_line(status: dict[str, Any]) -> str | None:
    """What the self-check at version 0 found, once the learner has made it."""
    for service in status["services"]:
        drift = service["figures"].get("self_check/drift/mean")
        if drift is not None:
            clipped = service["figures"].get("self_check/clip_fraction", 0.0)
            return (
                f"self-check passed: at version 0 engine and learner differ by {number(drift)} in log-prob on average, "
                f"{clipped:.1%} of the tokens clipped"
            )
    return None


def draw(status: dict[str, Any], events: list[str]) -> RenderableType:
    """The whole view."""
    metrics = status["metrics"]
    progress = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(status["steps"], 1), completed=status["version"], width=40)
    progress.add_row(
        f"step {status['version']}/{status['steps']}", bar, f"{duration(status['eta_s'])} left", status["state"]
    )
    figures = Table.grid(padding=(0, 2))
    figures.add_row("reward", number(metrics.get("reward/generated")), "loss", number(metrics.get("loss")))
    figures.add_row("accuracy", accuracy(status), "KL", number(metrics.get("kl")))
    figures.add_row(
        "staleness",
        f"{number(metrics.get('staleness/mean'))}, at most {number(metrics.get('staleness/max'))}",
        "drift",
        drift(metrics),
    )
    figures.add_row("samples/s", number(status["sequences_per_s"]), "of the freshest", fresh_drift(metrics))
    figures.add_row("tokens/s generated", number(status["tokens_per_s"]))
    own = algorithm_figures(metrics)
    for i in range(0, len(own), 2):
        figures.add_row(*(text for pair in own[i : i + 2] for text in pair))
    parts: list[RenderableType] = [progress, figures, _groups(status), _services(status)]
    parts.append(Text(f"pace: {status['bottleneck']}", style="bold"))
    parts += [Text(sentence, style="red") for sentence in [*status["warnings"][-2:], *events]]
    return Panel(Group(*parts), title=f"{status['name']}  {status['run_folder']}", border_style="cyan")


def _groups(status: dict[str, Any]) -> Text:
    """The account of groups, as a sum."""
    account = status["groups"]["train"]
    dropped = sum(account["dropped"].values())
    queued = ", ".join(f"{n} for {stage}" for stage, n in account["queued"].items()) or "0"
    leased = ", ".join(f"{n} at {stage}" for stage, n in account["leased"].items()) or "0"
    return Text(
        f"groups: {account['admitted']} admitted = {account['consumed']} consumed + {dropped} dropped + "
        f"{account['dead']} dead + {account['in_flight']} in flight (queued {queued}; leased {leased})"
    )


def _services(status: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bright_black")
    for title in ("service", "state", "busy", "where the time goes"):
        table.add_column(title)
    for service in [*status["services"], *status["departed"]]:
        seconds = service["time"]
        total = sum(seconds.values()) or 1.0
        bar = Text()
        for bucket, spent in seconds.items():
            bar.append("█" * round(24 * spent / total), style=BUCKET_COLOURS.get(bucket, "white"))
        shares = sorted(seconds.items(), key=lambda item: -item[1])[:3]
        bar.append("  " + ", ".join(f"{bucket} {spent / total:.0%}" for bucket, spent in shares if spent))
        table.add_row(service["instance"], service["state"], f"{seconds.get('compute', 0.0) / total:.0%}", bar)
    return table


def algorithm_figures(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """What only some algorithms and runs have, as title and text."""
    found = [(title, metrics.get(name)) for name, title in ALGORITHM_FIGURES.items()]
    signals = [(name.removeprefix("signal/"), v) for name, v in sorted(metrics.items()) if name.startswith("signal/")]
    several = signals if len(signals) > 1 else []
    return [(title, number(value)) for title, value in found + several if value is not None]


def drift(metrics: dict[str, Any]) -> str:
    """Distance of the learner's log-probs from the engine's, on all tokens of a step."""
    return f"{number(metrics.get('drift/mean'))} (max {number(metrics.get('drift/max'))})"


def fresh_drift(metrics: dict[str, Any]) -> str:
    """The same on the freshest samples, with their k3 and lag: at lag 0 it is what engine and learner compute apart."""
    mean, largest, k3, lag = (number(metrics.get(f"drift/fresh/{name}")) for name in ("mean", "max", "k3", "lag"))
    return f"{mean} (max {largest}, k3 {k3}, lag {lag})"


def accuracy(status: dict[str, Any]) -> str:
    """Held-out accuracy: the first and the latest."""
    found = [result["accuracy"] for result in status["evaluations"] if result["accuracy"] is not None]
    if not found:
        return "-"
    return number(found[0]) if len(found) == 1 else f"{number(found[0])} → {number(found[-1])}"


def number(value: float | None) -> str:
    """A figure with three digits."""
    return "-" if value is None else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Seconds as a person says them."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
