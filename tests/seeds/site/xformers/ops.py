"""The names that audiocraft imports and, with PyTorch's attention, uses: `unbind`, and a mask that only says causal."""

import torch

unbind = torch.unbind
LowerTriangularMask = type("LowerTriangularMask", (), {})
memory_efficient_attention = None
