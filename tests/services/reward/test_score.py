"""Scoring groups: columns, combination, and functions that fail in every way."""

from __future__ import annotations

import asyncio
import math
import os
import signal as signals
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from services.reward.pool import WorkerPool
from services.reward.score import ASYNC_AT_ONCE, Scorer, combine
from services.reward.signals import abstain, invalid, ok
from shared.config import Signal
from shared.errors import StrettoError
from shared.graph import scoring_stage
from shared.group import Columns, RewardStatus, TrajectoryGroup, split_ragged

MakeSignal = Callable[..., Signal]
MakeGroup = Callable[..., TrajectoryGroup]
StartScorer = Callable[..., Awaitable[Scorer]]
OK, ABSTAIN, INVALID = RewardStatus


def reasons_of(columns: Columns) -> list[str]:
    parts = split_ragged(columns["reward_reasons"], columns["reward_reasons_offsets"])
    return [part.tobytes().decode() for part in parts]


def test_the_reward_is_the_weighted_sum_of_the_signals_that_gave_a_value() -> None:
    weights = {"a": 1.0, "b": 0.5, "c": 10.0}
    assert combine({"a": ok(2), "b": ok(-1), "c": abstain()}, weights) == ok(1.5)


def test_one_invalid_signal_makes_the_sample_invalid() -> None:
    assert combine({"a": ok(2), "b": invalid("b failed")}, {"a": 1, "b": 0}) == invalid("b failed")


def test_a_sample_without_any_signal_is_invalid_and_not_0() -> None:
    assert combine({"a": abstain(), "b": abstain()}, {"a": 1, "b": 1}) == invalid("no signal: all abstained")


def test_a_sum_that_a_float32_cannot_hold_is_invalid() -> None:
    assert combine({"a": ok(1e38)}, {"a": 1e3}).status is INVALID


async def test_a_group_gets_the_columns_of_the_reward_stage(
    start_scorer: StartScorer, signal: MakeSignal, group: MakeGroup
) -> None:
    scorer = await start_scorer(
        signal("builtin exact_match", name="exact"), signal("obey_later", name="style", weight=0.5)
    )
    columns = await scorer.score(group("4", "none", "-2", "nan", answer="4"))
    assert set(columns) == scoring_stage("reward", ["exact", "style"]).provides
    assert columns["rewards"].tolist() == [3.0, 0.0, -1.0, 0.0]
    assert columns["reward_status"].tolist() == [OK, OK, OK, INVALID]
    assert columns["signal_status/style"].tolist() == [OK, ABSTAIN, OK, INVALID]
    np.testing.assert_equal(columns["signal/exact"], np.array([1, 0, 0, 0], dtype="f4"))
    np.testing.assert_equal(columns["signal/style"], np.array([4, math.nan, -2, math.nan], dtype="f4"))
    assert reasons_of(columns) == ["", "", "", "style returned nan, expected a finite float32"]
    assert {name: column.dtype.str[1:] for name, column in columns.items()} == {
        "rewards": "f4",
        "reward_status": "u1",
        "reward_reasons": "u1",
        "reward_reasons_offsets": "i8",
        "signal/exact": "f4",
        "signal/style": "f4",
        "signal_status/exact": "u1",
        "signal_status/style": "u1",
    }


async def test_a_group_gets_the_columns_of_the_cost_stage(
    start_scorer: StartScorer, signal: MakeSignal, group: MakeGroup
) -> None:
    scorer = await start_scorer(signal("obey_later", name="harm", weight=2.0), stage="cost")
    columns = await scorer.score(group("1", "nan"))
    assert set(columns) == scoring_stage("cost", ["harm"]).provides
    assert columns["costs"].tolist() == [2.0, 0.0]
    assert columns["cost_status"].tolist() == [OK, INVALID]
    with pytest.raises(StrettoError, match="no sample has a valid cost"):
        await scorer.score(group("nan"))


async def test_what_a_stage_leaves_out_is_not_scored_later_and_what_it_says_is_an_argument(
    start_scorer: StartScorer, signal: MakeSignal, group: MakeGroup
) -> None:
    safety = await start_scorer(signal("obey_later", name="safe", weight=0.5), stage="safety", at_least=1.0)
    scored = group("1", "2", "nan", "6")
    scored.columns |= await safety.score(scored)
    assert set(scored.columns) >= scoring_stage("safety", ["safe"]).provides
    assert scored.columns["stage/safety"].tolist() == [0, 1, 0, 3]
    assert scored.columns["stage_status/safety"].tolist() == [INVALID, OK, INVALID, OK]
    reward = await start_scorer(signal("doubled"), attempts=1)
    scored.columns |= (columns := await reward.score(scored))
    assert columns["rewards"].tolist() == [0, 2, 0, 6]
    assert columns["reward_status"].tolist() == [INVALID, OK, INVALID, OK]
    assert reasons_of(columns) == ["left out by the stage safety", "", "left out by the stage safety", ""]
    late = await start_scorer(signal("doubled", name="t"), stage="late", attempts=1)
    assert (await late.score(scored))["stage/late"].tolist() == [0, 4, 0, 36]


async def test_a_group_that_a_stage_leaves_out_whole_is_no_failure(
    start_scorer: StartScorer, signal: MakeSignal, group: MakeGroup
) -> None:
    safety = await start_scorer(signal("obey_later"), stage="safety", at_least=9.0)
    scored = group("1", "2")
    scored.columns |= await safety.score(scored)
    reward = await start_scorer(signal("obey_later"))
    assert (await reward.score(scored))["reward_status"].tolist() == [INVALID, INVALID]
    with pytest.raises(StrettoError, match="no sample has a valid safety; 1 of 1: s returned nan"):
        await safety.score(group("nan"))


async def test_a_signal_is_clipped_before_its_weight(
    start_scorer: StartScorer, signal: MakeSignal, group: MakeGroup
) -> None:
    scorer = await start_scorer(signal("obey_later", weight=10.0, clip=(-1, 2)))
    columns = await scorer.score(group("1.5", "7", "-7", "nan", "none"))
    np.testing.assert_equal(columns["signal/s"], np.array([1.5, 2, -1, math.nan, math.nan], dtype="f4"))
    assert columns["rewards"].tolist() == [15, 20, -10, 0, 0]
    assert columns["reward_status"].tolist() == [OK, OK, OK, INVALID, INVALID]


async def test_functions_that_hang_raise_or_end_their_process_harm_no_other_sample(
    start_scorer: StartScorer, signal: MakeSignal, group: MakeGroup
) -> None:
    scorer = await start_scorer(signal("obey"), timeout_s=1.0, attempts=1)
    columns = await scorer.score(group("1", "hang", "2", "exit", "crash", "3", "leave", "raise", "text", "4"))
    assert columns["rewards"].tolist() == [1, 0, 2, 0, 0, 3, 0, 0, 0, 4]
    assert [reason for reason in reasons_of(columns) if reason] == [
        "s gave no answer in 1 s",
        "s ended its process (exit code 7)",
        "s ended its process (exit code -11)",
        "s raised SystemExit: enough",
        "s raised KeyError: 'no such key'",
        "s returned str, expected a number or None",
    ]


async def test_a_worker_that_is_killed_while_idle_is_replaced(
    start_scorer: StartScorer, signal: MakeSignal, group: MakeGroup
) -> None:
    scorer = await start_scorer(signal("obey"), attempts=1)
    columns = await scorer.score(group("pid"))
    worker = int(columns["rewards"][0])
    os.kill(worker, signals.SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    assert (await scorer.score(group("1", "2", "3")))["rewards"].tolist() == [1, 2, 3]


async def test_async_functions_that_hang_or_raise_harm_no_other_sample(
    start_scorer: StartScorer, signal: MakeSignal, group: MakeGroup
) -> None:
    scorer = await start_scorer(signal("obey_later"), timeout_s=0.05, attempts=1)
    columns = await scorer.score(group("1", "hang", "raise", "2"))
    assert columns["rewards"].tolist() == [1, 0, 0, 2]
    assert reasons_of(columns)[1:3] == ["s gave no answer in 0.05 s", "s raised TimeoutError: the judge is busy"]


async def test_async_calls_are_bounded(start_scorer: StartScorer, signal: MakeSignal, group: MakeGroup) -> None:
    scorer = await start_scorer(signal("Crowd"))
    columns = await scorer.score(group(*["x"] * (2 * ASYNC_AT_ONCE)))
    assert columns["rewards"].max() == ASYNC_AT_ONCE


@pytest.mark.parametrize(("attempts", "status"), [(1, INVALID), (2, OK)])
async def test_an_invalid_score_is_tried_again_as_often_as_the_config_says(
    start_scorer: StartScorer,
    signal: MakeSignal,
    group: MakeGroup,
    tmp_path: Path,
    attempts: int,
    status: RewardStatus,
) -> None:
    scorer = await start_scorer(signal("second_time_right"), signal("obey_later", name="other"), attempts=attempts)
    if status is INVALID:
        with pytest.raises(StrettoError, match="ConnectionError: not yet"):
            await scorer.score(group("1", tally=str(tmp_path / "tally")))
    else:
        columns = await scorer.score(group("1", tally=str(tmp_path / "tally")))
        assert columns["reward_status"].tolist() == [status]


async def test_a_group_without_any_valid_reward_fails_with_the_commonest_reason(
    start_scorer: StartScorer, signal: MakeSignal, group: MakeGroup
) -> None:
    scorer = await start_scorer(signal("obey_later"))
    with pytest.raises(StrettoError, match="no sample has a valid reward; 2 of 3: s returned nan"):
        await scorer.score(group("nan", "text", "nan"))


async def test_a_class_is_made_once_a_worker(start_scorer: StartScorer, signal: MakeSignal, group: MakeGroup) -> None:
    scorer = await start_scorer(signal("Visits", args={"start": 10}))
    first = await scorer.score(group("a", "b"))
    second = await scorer.score(group("c"))
    assert sorted([*first["rewards"], *second["rewards"]]) == [11, 12, 13]


async def test_a_class_that_cannot_be_made_stops_the_start(start_scorer: StartScorer, signal: MakeSignal) -> None:
    with pytest.raises(StrettoError, match="cannot be made: OSError: no index at /data"):
        await start_scorer(signal("Unwilling"))


SERVICE = """
import asyncio, sys
from services.reward.pool import WorkerPool
from services.reward.score import Scorer
from shared.config import Reward, Signal
from shared.group import Prompt, TrajectoryGroup, ragged, ragged_text
import numpy as np

async def main(function, fifo):
    scorer = Scorer(Reward(signals=[Signal(name="s", function=function)]))
    await scorer.start()
    columns = {**ragged("tokens", [[1]], "i4"), **ragged_text("text", ["x"]), "finish_reasons": np.zeros(1, "u1")}
    await scorer.score(TrajectoryGroup("g", "train", Prompt(0, 0, "?", {"fifo": fifo}), columns=columns))

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""


def test_no_worker_outlives_a_service_that_is_killed(tmp_path: Path) -> None:
    script, fifo = tmp_path / "service.py", tmp_path / "fifo"
    script.write_text(SERVICE)
    os.mkfifo(fifo)
    function = f"{Path(__file__).with_name('functions.py')}:tell_and_hang"
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, script, function, fifo], env=environment) as service:
        worker = psutil.Process(int(fifo.read_text()))
        service.send_signal(signals.SIGKILL)
    worker.wait(10)


async def test_a_cancelled_call_frees_its_worker_and_ends_the_process(signal: MakeSignal, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pool = WorkerPool([signal("tell_and_hang", name="hang"), signal("obey")], workers=1, timeout_s=60)
    await pool.start()
    try:
        call = asyncio.create_task(pool.score("hang", {"fifo": str(fifo)}))
        process = psutil.Process(int(await asyncio.to_thread(fifo.read_text)))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await pool.score("s", {"completion": "2"}) == ok(2)
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    finally:
        await pool.close()
