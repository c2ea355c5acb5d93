"""Transformers' own generation tests, run with every model accelerated."""
