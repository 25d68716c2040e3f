"""Trainings under frameworks that are not ours: rows as their authors wrote them, and the bytes these hold."""
