"""A short round of tests/chaos/transports.py: whoever dies around a broadcast, the others get the weights."""

from __future__ import annotations

from tests.chaos import transports


async def test_whoever_dies_around_a_broadcast_the_others_get_the_weights():
    moments = transports.MOMENTS
    results = await transports.repetitions(len(moments), receivers=3, mib=16, moments=moments, spare_s=30.0)
    assert [result["moment"] for result in results] == list(moments)
    assert "| stopped | 1 |" in transports.table(results)
