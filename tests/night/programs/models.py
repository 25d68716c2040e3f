"""A GAN or a U-Net, as the first argument names, that is preempted once."""

import torch
import ways
from torch import nn


class UNet(nn.Module):
    """Two halvings of a square image, and the way back with the larger images beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        wide = self.first(images).relu()
        deep = self.up(self.down(wide).relu())
        return self.last(torch.cat((wide, deep), 1))


class Models(ways.Ways):
    """A script whose network is no plain one."""

    def build(self) -> None:
        if self.way == "unet":
            self.model = UNet()
        else:
            self.model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))
            self.critic = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
            self.critic_optimizer = torch.optim.AdamW(self.critic.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def parts(self) -> dict[str, object]:
        if self.way == "unet":
            return super().parts()
        return {**super().parts(), "critic": self.critic, "optimizer_d": self.critic_optimizer}

    def loss(self) -> torch.Tensor:
        samples = self.batch()
        if self.way == "unet":
            images = samples.view(-1, 1, 8, 8)
            return (self.model(images + torch.randn_like(images)) - images).square().mean()
        made = self.model(torch.randn(len(samples), 8))
        softplus = nn.functional.softplus
        wrong = softplus(-self.critic(samples)) + softplus(self.critic(made.detach()))
        self.critic_optimizer.zero_grad()
        wrong.mean().backward()
        self.critic_optimizer.step()
        return softplus(-self.critic(made)).mean()

    def at_unet(self) -> None:
        """Be preempted."""
        self.preempt()

    def at_gan(self) -> None:
        """Be preempted."""
        self.preempt()


Models.start()
