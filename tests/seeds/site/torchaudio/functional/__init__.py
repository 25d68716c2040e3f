"""Imported, not called."""
