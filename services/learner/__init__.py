"""Trains the policy."""
