"""The embedded engine: transformers models, decoded by a loop of our own."""
