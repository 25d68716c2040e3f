"""Imported by audiocraft, not called."""
