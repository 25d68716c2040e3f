"""Gives the five scripts what a machine without a GPU lacks, in modules that they import; no file of theirs changes."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _flash_attention(module):
    """Orpheus asks transformers for flash-attention, which needs CUDA: PyTorch's own attention stands in."""
    model = module.PreTrainedModel
    model._check_and_enable_flash_attn_2 = classmethod(
        lambda cls, config, *_, **__: cls._check_and_enable_sdpa(config)
    )


def _count_devices(module):
    """RVC starts as many ranks as there are GPUs, and names them in CUDA_VISIBLE_DEVICES itself."""
    module.device_count = lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))


def _declare_operators(module):
    """PyPI's torchvision is built for CUDA's PyTorch: its library does not load, and it needs the names of two."""
    if module._has_ops():
        return
    import torch

    module.library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        module.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _shrink_videomae(module):
    """LatentSync's VideoMAE has a billion parameters, and its sizes stand in its code: the same class, small."""
    sizes = {"patch_size": 14, "embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 2}

    def make_small(pretrained=False, **others):
        assert not pretrained
        return module.VisionTransformer(**sizes, **others)

    module.vit_giant_patch14_224 = make_small


class _After(importlib.abc.MetaPathFinder):
    """Runs a function of ours after the ordinary import of a module."""

    def __init__(self, waiting):
        self._waiting = waiting

    def find_spec(self, name, *_):
        """The module's own spec, with our function at its end."""
        after = self._waiting.pop(name, None)
        if after is None:
            return None
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            after(module)

        spec.loader.exec_module = exec_module
        return spec


def _run_hidden():
    paths = [os.path.abspath(entry) for entry in sys.path]
    later = sys.path[paths.index(HERE) + 1 :] if HERE in paths else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", later)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


waiting = {
    "transformers.modeling_utils": _flash_attention,
    "torchvision.extension": _declare_operators,
    "latentsync.trepa.third_party.VideoMAEv2.videomaev2_finetune": _shrink_videomae,
}
if "SEED_COUNTS" in os.environ:
    waiting["torch.cuda"] = _count_devices
sys.meta_path.insert(0, _After(waiting))
_run_hidden()
