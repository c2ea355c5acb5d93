"""Requests, scheduling and the decode loop over any step model."""
