"""A run whose rollout generates with vLLM, on its CPU build."""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest

from shared.config import load_config
from stretto.launcher import LocalRun

from .conftest import read_lines


@pytest.mark.vllm
@pytest.mark.timeout(480)
async def test_a_run_goes_on_after_its_engine_core_was_killed(workplace, vllm_model):
    rollout = {"engine": "vllm", "dtype": "float32", "max_samples": 16, "vllm": {"cache_gib": 0.25}}
    file = workplace.write(
        model=str(vllm_model),
        rollout=rollout,
        steps=6,
        max_staleness=1,
        sampling={"max_tokens": 24},
        weights={"transport": "gloo"},
    )
    events: list[str] = []
    run = LocalRun(load_config(file), workplace.run_folder, on_event=events.append)
    await run.start()
    waiting = asyncio.create_task(run.wait())
    async with asyncio.timeout(400):
        await run.status(wait_version=2, wait_s=300.0)
        (core,) = [p for p in psutil.Process(run.pids["rollout-0"]).children() if "EngineCore" in " ".join(p.cmdline())]
        core.send_signal(signal.SIGKILL)
        await waiting
    assert any("rollout-0" in event and "engine core has died" in event for event in events), events
    metrics = read_lines(workplace.run_folder / "metrics.jsonl")
    assert [m["version"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    rows = [s["row"] for s in read_lines(workplace.run_folder / "samples.jsonl") if s["lane"] == "train"]
    assert len(rows) == len(set(rows)) == 24
    swaps = [s for s in read_lines(workplace.run_folder / "logs" / "rollout-0.jsonl") if s["event"] == "weights"]
    assert len(swaps) >= 2 and all(s["weights/received_mib"] > 0 for s in swaps)
