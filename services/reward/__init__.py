"""Scores samples."""
