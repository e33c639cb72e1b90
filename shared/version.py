"""The version of the distribution, in its one place."""

__version__ = "0.1.0"
