"""Trajectory groups and their columns."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.group import Prompt, TrajectoryGroup, offsets_name, ragged, ragged_text, version_runs


def group(**columns: np.ndarray) -> TrajectoryGroup:
    return TrajectoryGroup("g1", "train", Prompt(0, 0, "2+2?"), min_version=3, columns=columns)


@given(st.lists(st.lists(st.integers(-100, 100)), max_size=8))
def test_ragged_columns_give_back_the_samples_that_were_put_in(parts: list[list[int]]) -> None:
    columns = ragged("tokens", parts, "i4")
    assert columns["tokens"].dtype == np.dtype("i4")
    assert columns["tokens_offsets"].dtype == np.dtype("i8")
    made = group(**columns)
    assert made.n_samples == len(parts)
    assert [part.tolist() for part in made.samples("tokens")] == parts


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=8))
def test_texts_of_any_script_survive(texts: list[str]) -> None:
    assert group(**ragged_text("text", texts)).texts() == texts


def test_bytes_that_are_no_text_are_replaced_and_not_refused() -> None:
    columns = ragged("text", [np.array([0x68, 0xFF], dtype="u1")], "u1")
    assert group(**columns).texts() == ["h\N{REPLACEMENT CHARACTER}"]


def test_columns_of_tokens_share_the_offsets_of_the_tokens() -> None:
    made = group(**ragged("tokens", [[1, 2], [3]], "i4"), behavior_logprobs=np.array([-0.5, -1, -2], dtype="f4"))
    assert offsets_name("behavior_logprobs") == "tokens_offsets"
    assert offsets_name("text") == "text_offsets"
    assert [part.tolist() for part in made.samples("behavior_logprobs")] == [[-0.5, -1.0], [-2.0]]


@given(st.lists(st.integers(0, 5)))
def test_version_runs_tell_the_version_of_each_token(versions: list[int]) -> None:
    runs = version_runs(versions)
    assert runs.dtype == np.dtype("i4")
    assert np.repeat(runs[:, 0], runs[:, 1]).tolist() == versions
    assert (np.diff(runs[:, 0]) != 0).all()


def test_the_oldest_version_is_that_of_the_oldest_token_of_any_sample() -> None:
    runs = ragged("versions", [version_runs([7, 7, 8]), version_runs([5, 8])], "i4")
    assert group(**runs).oldest_version() == 5
    assert group().oldest_version() == 3


def test_a_group_without_columns_has_no_samples() -> None:
    assert group().n_samples == 0


def test_a_prompt_survives_the_wire_and_reads_as_its_last_message() -> None:
    chat = [{"role": "system", "content": "Calculator"}, {"role": "user", "content": "2+2?"}]
    prompt = Prompt(4, 1, chat, {"answer": 4})
    assert Prompt.from_wire(prompt.to_wire()) == prompt
    assert prompt.text == Prompt(4, 1, "2+2?").text == "2+2?"
