"""The order of prompts, and how many updates they make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.broker.dataset import Dataset
from services.broker.prompts import PromptSource, first_prompts, total_steps


def dataset(rows):
    return Dataset([{"prompt": f"p{i}", "answer": i} for i in range(rows)], "memory", "prompt")


def source(rows=5, seed=0, shuffle=True):
    return PromptSource(dataset(rows), seed=seed, shuffle=shuffle)


def rows(prompts):
    return [prompt.row for prompt in prompts]


@given(st.integers(1, 20), st.integers(0, 2**31), st.integers(1, 3))
def test_each_epoch_has_every_row_once(n, seed, epochs):
    drawn = source(n, seed)
    for epoch in range(epochs):
        prompts = [drawn.draw() for _ in range(n)]
        assert sorted(rows(prompts)) == list(range(n))
        assert {prompt.epoch for prompt in prompts} == {epoch}


def test_the_order_is_the_same_for_the_same_seed_and_differs_between_seeds_and_epochs():
    one, same, other = ([s.draw() for _ in range(40)] for s in (source(20), source(20), source(20, seed=1)))
    assert one == same
    assert rows(one) != rows(other)
    assert rows(one[:20]) != rows(one[20:])


def test_without_shuffling_rows_come_in_their_order():
    drawn = source(3, shuffle=False)
    assert rows(drawn.draw() for _ in range(5)) == [0, 1, 2, 0, 1]


@given(st.integers(0, 30))
def test_a_source_put_at_a_position_goes_on_as_if_it_had_drawn_all_before(position):
    drawn, put = source(7), source(7)
    for _ in range(position):
        drawn.draw()
    put.position = position
    assert [drawn.draw() for _ in range(10)] == [put.draw() for _ in range(10)]


def test_a_prompt_that_was_given_back_comes_next_and_is_counted_once():
    drawn = source()
    first, second = drawn.draw(), drawn.draw()
    drawn.give_back(first)
    assert drawn.draw() == first
    assert drawn.position == 2
    assert drawn.draw() not in (first, second)


def test_evaluations_take_the_first_rows():
    assert rows(first_prompts(dataset(5), 3)) == [0, 1, 2]
    assert rows(first_prompts(dataset(2), 3)) == [0, 1]


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"), [(7, None, 7), (None, 3, 7), (4, 3, 4), (100, 3, 7), (None, 1, 2)]
)
def test_a_run_ends_at_its_steps_or_with_the_last_whole_step_of_its_epochs(steps, epochs, expected):
    assert total_steps(10, 4, steps, epochs) == expected
