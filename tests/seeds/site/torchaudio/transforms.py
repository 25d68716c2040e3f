"""One is called: the loudness to which MusicGen brings what it generates. Others are imported."""

import torch

MelSpectrogram = Spectrogram = Resample = None


class Loudness(torch.nn.Module):
    """The level of a wave in dB, without the weighting of frequencies."""

    def __init__(self, _rate):
        super().__init__()

    def forward(self, wave):
        """One number."""
        return 10 * torch.log10(wave.square().mean() + 1e-9)
