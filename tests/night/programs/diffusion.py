"""The training of a tiny UNet2DModel of diffusers, which is preempted once."""

import torch
import ways
from diffusers import DDPMScheduler, UNet2DModel


class Diffusion(ways.Ways):
    """A script that learns the noise of images."""

    def build(self) -> None:
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        shape = {"sample_size": 8, "in_channels": 1, "out_channels": 1}
        self.model = UNet2DModel(
            **shape, **blocks, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1
        )
        self.scheduler = DDPMScheduler()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def loss(self) -> torch.Tensor:
        images = self.batch().view(-1, 1, 8, 8)
        noise = torch.randn_like(images)
        times = torch.randint(0, 1000, (len(images),))
        noisy = self.scheduler.add_noise(images, noise, times)
        return (self.model(noisy, times).sample - noise).square().mean()

    def at_diffusers(self) -> None:
        """Be preempted."""
        self.preempt()


Diffusion.start()
