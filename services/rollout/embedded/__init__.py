"""The default engine: transformers models, no vLLM needed."""
