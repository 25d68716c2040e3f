"""What audiocraft imports and, with PyTorch's attention, uses of it: `unbind`, and a mask that only says causal."""

import torch

unbind = torch.unbind
LowerTriangularMask = type("LowerTriangularMask", (), {})
memory_efficient_attention = None
