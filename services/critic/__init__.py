"""The value models: they value states for the learner, and learn from its returns."""
