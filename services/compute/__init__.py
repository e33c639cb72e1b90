"""What the services that compute with a model share: packing, the model itself, log-probs, the optimizer."""
