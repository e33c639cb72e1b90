"""Names, units and kinds of metrics."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.page import Page, metric_name


def samples(page: Page) -> dict:
    """What Prometheus reads of a page: (name, labels) → value."""

    class Registry:
        def collect(self):
            return page.families.values()

    families = text_string_to_metric_families(generate_latest(Registry()).decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


@pytest.mark.parametrize(
    ("figure", "name", "factor"),
    [
        ("weights/pause_s", "weights_pause_seconds", 1),
        ("memory/peak_mib", "memory_peak_bytes", 2**20),
        ("weights/streamed_mib", "weights_streamed_bytes_total", 2**20),
        ("busy_s", "busy_seconds_total", 1),
        ("tokens", "tokens_total", 1),
        ("drift/fresh/k3", "drift_fresh_k3", 1),
        ("samples_in_flight", "samples_in_flight", 1),
    ],
)
def test_the_name_of_a_figure_follows_from_its_own(figure, name, factor):
    assert metric_name(figure) == (name, factor)


def test_a_page_has_its_labels_on_every_metric_and_base_units():
    page = Page(service="rollout", instance="rollout-0")
    page.add_figures({"weights/pause_s": 0.5, "memory/peak_mib": 2.0, "reward": None})
    page.add_figures({"tokens": 7.0}, prefix="rollout_")
    page.add("groups_queued", "…", 3, lane="train", stage="reward")
    own = (("instance", "rollout-0"), ("service", "rollout"))
    assert samples(page) == {
        ("stretto_weights_pause_seconds", own): 0.5,
        ("stretto_memory_peak_bytes", own): 2.0 * 2**20,
        ("stretto_rollout_tokens_total", own): 7.0,
        ("stretto_groups_queued", (own[0], ("lane", "train"), own[1], ("stage", "reward"))): 3.0,
    }
    assert [f.type for f in page.families.values()] == ["gauge", "gauge", "counter", "gauge"]


def test_a_state_is_1_and_the_others_are_0():
    page = Page()
    page.add_state("SERVING", ("STARTING", "SERVING"))
    states = {dict(labels)["state"]: value for (_, labels), value in samples(page).items()}
    assert states == {"starting": 0.0, "serving": 1.0}
