"""Gradient modes, one per file: fields of the section ``grad``, checks and privacy."""
