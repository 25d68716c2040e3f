"""Stands in for xformers, which has no build without CUDA: PyTorch's attention is MusicGen's own default."""
