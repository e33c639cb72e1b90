"""The vLLM engine: samples of AsyncLLM, weights through its own weight-transfer interface."""

BACKEND = "stretto"
"""Name of our engine in vLLM's registry of weight-transfer engines."""
