"""A codec with the calls and the strides of DAC, and a small part of its layers."""

import torch
from torch import nn

STRIDES, WIDTH = (2, 4, 8, 8), 16


def _conv(ins, outs, stride):
    return nn.utils.weight_norm(nn.Conv1d(ins, outs, 2 * stride, stride, stride // 2))


class _Quantizer(nn.Module):
    def __init__(self, codebooks, size, width):
        super().__init__()
        self.tables = nn.Parameter(torch.randn(codebooks, size, width))

    def forward(self, z, count):
        """Codes of shape (batch, count, frames), each of what the ones before left over."""
        codes, rest = [], z.transpose(1, 2)
        for table in self.tables[:count]:
            codes.append(torch.cdist(rest, table.expand(len(rest), -1, -1)).argmin(-1))
            rest = rest - table[codes[-1]]
        return torch.stack(codes, 1)

    def from_codes(self, codes):
        """The sum of the codes' vectors, of shape (batch, width, frames), first of a tuple."""
        parts = (
            table[codes[:, index]] for index, table in enumerate(self.tables[: codes.shape[1]])
        )
        return sum(parts).transpose(1, 2), None, codes


class DAC(nn.Module):
    """`encode` gives codes in second place; one frame for 512 samples."""

    def __init__(self, n_codebooks=9, latent_dim=1024, codebook_size=1024):
        super().__init__()
        widths = [1, *(WIDTH << index for index in range(len(STRIDES) - 1)), latent_dim]
        layers = [
            _conv(widths[index], widths[index + 1], stride) for index, stride in enumerate(STRIDES)
        ]
        self.encoder = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))
        self.quantizer = _Quantizer(n_codebooks, codebook_size, latent_dim)
        self.decoder = nn.utils.weight_norm(nn.ConvTranspose1d(latent_dim, 1, 512, 512))

    def preprocess(self, audio, _rate):
        """Whole frames."""
        return nn.functional.pad(audio, (0, -audio.shape[-1] % 512))

    def encode(self, audio, n_quantizers=None):
        """(z, codes, latents, losses)."""
        z = self.encoder(audio)
        return z, self.quantizer(z, n_quantizers), z, 0.0, 0.0

    def decode(self, z):
        """Audio of shape (batch, 1, samples)."""
        return self.decoder(z)
