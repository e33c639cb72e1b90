"""A short round of tests/soak/soak.py, and its verdict on made-up figures."""

from __future__ import annotations

import pytest

from tests.soak.soak import Sample, config_of, soak, sparkline, table, verdict

STEADY = [Sample(version, 100_000_000 + version % 7 * 10_000, 50_000_000, 20, 4) for version in range(0, 1000, 10)]


def changed(**by_version):
    """STEADY, where each figure named is what its function makes of the version and the figure."""
    samples = []
    for sample in STEADY:
        figures = {name: change(sample.version, getattr(sample, name)) for name, change in by_version.items()}
        samples.append(Sample(**{name: figures.get(name, getattr(sample, name)) for name in Sample.__slots__}))
    return samples


async def test_every_service_of_a_run_keeps_its_memory_files_and_threads(tmp_path, tiny_model):
    watch = await soak(tmp_path, config_of(tmp_path, tiny_model, steps=400), every=10, show=print)
    assert set(watch.samples) == {"broker", "broadcaster", "rollout-0", "reward-0", "learner"}
    # What is remembered for a while fills up later than here: hence a wider bound, and a longer warm-up.
    warm = {instance: [s for s in seen if s.version >= 150] for instance, seen in watch.samples.items()}
    assert verdict(warm, max_growth=0.1) == [], "\n".join(table(warm))


def test_steady_figures_pass():
    assert verdict({"broker": STEADY}, 0.01) == []


def test_what_grows_in_the_warm_up_and_a_peak_in_the_middle_pass():
    grown = changed(rss=lambda version, rss: rss if version >= 100 else rss // 2)
    peak = changed(rss=lambda version, rss: rss * 2 if version == 500 else rss)
    assert verdict({"broker": grown, "learner": peak}, 0.01) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"rss": lambda version, rss: rss + version * 2000}, "broker: resident memory grew by 1.6"),
        ({"files": lambda version, files: files + version // 300}, "broker: 20 files became 23"),
        ({"threads": lambda version, threads: threads + (version > 800)}, "broker: 4 threads became 5"),
    ],
)
def test_a_leak_is_named_with_its_process_and_its_size(changes, fault):
    (found,) = verdict({"broker": changed(**changes), "learner": STEADY}, 0.01)
    assert found.startswith(fault)


def test_the_table_shows_each_process_and_its_growth():
    leaking = changed(rss=lambda version, rss: rss + version * 100_000)
    broker, learner = table({"broker": leaking, "learner": STEADY})[2:]
    assert broker.startswith("| broker | 109.2") and "+69." in broker and "20 → 20" in broker
    assert learner.startswith("| learner | 95.39 | 95.40 | +0.00% |")


def test_a_sparkline_goes_from_the_lowest_to_the_highest():
    assert sparkline([0, 7, 14]) == "▁▄█" and sparkline([5, 5]) == "▁▁"
    assert sparkline(list(range(300)), width=8) == "▁▁▂▃▄▅▆█"
