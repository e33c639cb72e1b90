"""Stands in for `python -m stretto` in a test: the engine reports log-probs that are off, more so with each version.

Those of version v are 0.25 · v² nats too low: right at version 0, where the self-check looks.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from stretto.cli import main


def perturb() -> None:
    from services.rollout.embedded.engine import EmbeddedEngine

    generate = EmbeddedEngine.generate

    async def perturbed(engine, request):
        samples = await generate(engine, request)
        return [replace(s, logprobs=s.logprobs - (0.25 * s.versions**2).astype("f4")) for s in samples]

    EmbeddedEngine.generate = perturbed


if __name__ == "__main__":
    if sys.argv[2] == "rollout":
        perturb()
    main()
