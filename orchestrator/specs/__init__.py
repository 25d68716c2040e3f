"""Immutable data types that all packages share, their units, and the one tree of exceptions."""
