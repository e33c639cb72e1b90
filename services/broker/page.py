"""What the broker shows to Prometheus, from the status of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.page import Page

STATES = ("running", "draining", "finished", "stopped", "failed")
COUNTS = {
    "version": ("policy_version", "updates that were committed"),
    "lineage": ("lineage", "how often the run was rewound to a checkpoint"),
    "steps": ("steps", "updates that the run is made of"),
    "saved_version": ("saved_version", "version of the last checkpoint"),
    "staleness": ("staleness", "versions that the oldest token of the last update lagged"),
    "sequences_per_s": ("trained_samples_per_second", "over the last versions"),
    "tokens_per_s": ("generated_tokens_per_second", "over the last versions"),
    "eta_s": ("eta_seconds", "the time left"),
    "groups_wanted": ("groups_wanted", "training groups to generate now: under way, waiting, or yet to be admitted"),
    "groups_ready": ("groups_ready", "training groups that wait for the learner with all their columns"),
}
"""Keys of the status, and the names and meanings of their metrics."""


def fill(page: Page, status: dict[str, Any], stages: Iterable[str]) -> None:
    """Add the metrics of a status (protocol/SPEC.md) to a page. stages: of the run."""
    page.add_state(status["state"], STATES)
    for key, (name, meaning) in COUNTS.items():
        page.add(name, meaning, status[key])
    for lane, account in status["groups"].items():
        _add_groups(page, lane, account, stages)
    members = Counter((member["service"], member["state"].lower()) for member in status["services"])
    for (service, state), count in members.items():
        page.add("members", "instances that are there", count, member=service, state=state)
    for code, count in status["refused_messages"].items():
        page.add("refused_messages_total", "messages that broke the rules, or came too late", count, code=code)
    if status["evaluations"]:
        latest = status["evaluations"][-1]
        page.add_figures({name: latest[name] for name in ("version", "accuracy", "reward")}, prefix="evaluation_")
    for name, value in status["metrics"].items():
        if name.startswith("signal/"):
            page.add("step_signal", "mean of a signal in the last update", value, signal=name.removeprefix("signal/"))
        else:
            page.add_figures({name: value}, prefix="step_")


def _add_groups(page: Page, lane: str, account: dict[str, Any], stages: Iterable[str]) -> None:
    """Counts are gauges: a run that is rewound takes back what it had consumed."""
    for name in ("admitted", "consumed", "dead", "in_flight"):
        page.add(f"groups_{name}", "groups of a lane", account[name], lane=lane)
    for reason, count in account["dropped"].items():
        page.add("groups_dropped", "groups that left without being trained", count, lane=lane, reason=reason)
    for name in ("queued", "leased"):
        for stage in stages:
            page.add(f"groups_{name}", "groups at a stage", account[name].get(stage, 0), lane=lane, stage=stage)
