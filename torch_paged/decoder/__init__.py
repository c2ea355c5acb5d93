"""A decoder as data (spec), as a list of op calls (plan), and as a running step."""
