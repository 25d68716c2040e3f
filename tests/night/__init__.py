"""Nights that are really run: drawn jobs and faults on a real service, judged in the morning."""
