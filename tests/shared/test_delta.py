"""Deltas: exact for any bit patterns, small where little changed, and nothing worse than an error where damaged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import delta


def patterns(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n, dtype="u1")


def changed(old, item_bytes, where, steps):
    new = old.copy()
    new.view(f"<u{item_bytes}")[where] += np.asarray(steps, dtype=f"<u{item_bytes}")
    return new


@pytest.mark.parametrize("item_bytes", [2, 4])
@given(data=st.data())
def test_a_delta_gives_exactly_the_new_bits(item_bytes, data):
    items = data.draw(st.integers(1, 3000))
    old = patterns(items * item_bytes)
    where = sorted(data.draw(st.sets(st.integers(0, items - 1), max_size=items // 8)))
    steps = data.draw(st.lists(st.integers(1, 2 ** (8 * item_bytes) - 1), min_size=len(where), max_size=len(where)))
    new = changed(old, item_bytes, where, steps)
    coded = delta.encode(old, new, item_bytes)
    if coded is not None:  # None only where the delta's own head outweighs it
        assert len(coded) < len(new)
        delta.apply(coded, old, item_bytes)
        assert np.array_equal(old, new)
    else:
        assert len(new) < 100 + 8 * len(where)


@pytest.mark.parametrize("gap", [3, 300, 70_000])
def test_gaps_of_any_length(gap):
    old = patterns(400_000)
    new = changed(old, 2, np.arange(0, 200_000, gap), 1)
    coded = delta.encode(old, new, 2)
    if gap == 3:
        assert coded is None or len(coded) < len(new)
    else:
        delta.apply(coded, old, 2)
        assert np.array_equal(old, new) and len(coded) < 4000


def test_what_is_all_new_has_no_delta():
    assert delta.encode(patterns(4096), patterns(4096, seed=1), 2) is None


def test_steps_to_the_neighbour_cost_about_a_byte_each():
    old = patterns(1 << 20)
    where = np.flatnonzero(patterns(1 << 19, seed=2) < 10)  # 4%
    coded = delta.encode(old, changed(old, 2, where, 1), 2)
    assert coded is not None and len(coded) < 1.2 * len(where)


@given(st.binary(max_size=60), st.integers(0, 200), st.booleans())
def test_damaged_deltas_are_refused_or_change_bits_and_nothing_else(junk, at, cut):
    old = patterns(4096)
    coded = delta.encode(old, changed(old, 2, [5, 900, 2000], 7), 2)
    damaged = coded[:at] if cut else coded[:at] + junk + coded[at + len(junk) :]
    try:
        delta.apply(damaged, old, 2)
    except ValueError:
        assert damaged != coded
    assert len(old) == 4096
