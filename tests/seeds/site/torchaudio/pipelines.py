"""Imported by Parler-TTS for metrics that its runs here do not compute."""

SQUIM_OBJECTIVE = None
