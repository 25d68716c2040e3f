"""Stands in for torchaudio, which has no build for the tests' PyTorch: what the five trainers import of it."""

from . import functional, pipelines, transforms  # noqa: F401
