"""Stretto: asynchronous reinforcement-learning post-training of language models, as a set of long-running services."""

from shared.version import __version__

__all__ = ["__version__"]
