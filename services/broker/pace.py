"""How fast a run goes: samples trained and tokens generated a second over its last versions, and the time left."""

from __future__ import annotations

from collections import deque

WINDOW = 20
"""Versions that the rates are taken over."""


class Pace:
    """Told by the server of each completion and commit. Time is an argument (seconds)."""

    def __init__(self) -> None:
        self._generated_tokens = 0
        self._commits: deque[tuple[float, int, int]] = deque(maxlen=WINDOW + 1)

    def generated(self, tokens: int) -> None:
        """A rollout delivered so many tokens."""
        self._generated_tokens += tokens

    def committed(self, now: float, samples: int) -> None:
        """A version was committed that consumed so many samples."""
        self._commits.append((now, samples, self._generated_tokens))

    def figures(self, steps_left: int) -> dict[str, float | None]:
        """sequences_per_s (trained), tokens_per_s (generated) and eta_s; None before the second version."""
        if len(self._commits) < 2:
            return {"sequences_per_s": None, "tokens_per_s": None, "eta_s": None}
        (began, first_samples, first_tokens), (ended, _, last_tokens) = self._commits[0], self._commits[-1]
        elapsed_s = max(ended - began, 1e-9)
        samples = sum(samples for _, samples, _ in self._commits) - first_samples
        return {
            "sequences_per_s": samples / elapsed_s,
            "tokens_per_s": (last_tokens - first_tokens) / elapsed_s,
            "eta_s": elapsed_s / (len(self._commits) - 1) * steps_left,
        }
