"""Tells who may write and who should read which snapshot of the weights."""
