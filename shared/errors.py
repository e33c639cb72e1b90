"""Every error that Stretto raises on purpose. The text of each says what happened, to what, and what to do about it."""

from __future__ import annotations


class StrettoError(Exception):
    """Base of all errors whose text is meant for the user: the command line prints it without a traceback.

    `exit_code` is what a process that ends with the error exits with. The launcher restarts a service that failed,
    except after a `ConfigError`, which no restart can mend, or when the run has ended (`RunStopped`).
    """

    exit_code = 1


class ConfigError(StrettoError):
    """The run cannot work as it was asked for: a wrong key, a missing file, a contradiction."""

    exit_code = 2


class DataError(ConfigError):
    """A dataset, a model folder or a run folder is missing, empty or not what it should be."""


class PluginError(ConfigError):
    """User code named in the config could not be loaded."""


class ProtocolError(StrettoError):
    """A message broke the rules of the wire. `code` is one of those listed in protocol/SPEC.md."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class Unreachable(StrettoError):
    """A peer gave no answer within its deadline."""


class RunStopped(StrettoError):
    """The broker ended the run, because of a fault that goes on or because somebody asked for it."""

    exit_code = 3


class EngineFailed(StrettoError):
    """What a service computes with is gone. It leaves the run, its groups go to others, and it is started again."""


class OutOfMemory(ConfigError):
    """A model does not fit into the memory of its device with these settings; started again it would not either."""


class WeightsError(StrettoError):
    """A rollout's weights are not those that the learner published."""


class BrokenTransfer(WeightsError):
    """A collective transfer was given up: a member is gone, or no byte came in time."""


class SelfCheckError(ConfigError):
    """Engine and learner do not agree at version 0; training on would be training on noise."""


class DriftError(ConfigError):
    """Engine and learner have come to disagree in the course of a run, by more than its limit."""
