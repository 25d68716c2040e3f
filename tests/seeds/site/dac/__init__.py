"""Stands in for descript-audio-codec, which needs a package that is not on PyPI."""
