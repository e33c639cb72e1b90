"""Generates samples."""
