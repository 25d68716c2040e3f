"""LatentSync: its own stage-2 file in small sizes, frozen models of random weights, and films of a test pattern."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = "LatentSync"
JOB = "latentsync/stage2.yaml"
ENVIRONMENT = "latentsync"  # a torchvision beside the others' transformers fails
RESUMED = r"resume from global_step: (\d+)"
CLIPS = 8
CLIP_S = 3  # a clip has at least 48 frames, of 25 a second
STEPS = 16
STEPS_BETWEEN_CHECKPOINTS = 4
HUB_REVISION = "0" * 40

SIZES = {
    "gpus": 2,
    "profile": {
        "parameters": 4_000_000,
        "layers": 16,
        "activations_per_sample": "60MiB",
        "checkpointed_per_sample": "10MiB",
    },
}
CASES = (
    {
        "where": "fake card",
        "mib": (2500, 2500),
        "options": {},
        "sizes": SIZES,
        "story": ("finished",),
        "end": "succeeded",
    },
    # GradScaler passes over its first four steps, and AdamW has its states from the fifth on: with
    # them the sixth step is too large, 19 MiB above the others, and a checkpoint of the fourth is there
    {
        "where": "fake card",
        "mib": (2206, 2206),
        "options": {},
        "sizes": SIZES,
        "story": ("device_oom", "finished"),
        "end": "succeeded: .* did not take up again the states of the optimizer .*",
        "resumed": "4",
    },
    # with checkpointing, too, the sixth step is too large
    {
        "where": "fake card",
        "mib": (2060, 2060),
        "options": {},
        "sizes": SIZES,
        "story": ("device_oom", "device_oom"),
        "end": r"asks: .*--global-batch-size 2\b.*",
    },
)


def make(folder: Path, checkout: Path) -> None:
    """The two files of sizes, the films, and each frozen model as its own class makes it."""
    stage_path = checkout / "configs/unet/stage2.yaml"
    stage = yaml.safe_load(stage_path.read_text())
    stage["data"] |= {
        "train_fileslist": str(folder / "clips.txt"),
        "num_workers": 1,
        "resolution": 64,
        "audio_embeds_cache_dir": str(folder / "embeds"),
        "audio_mel_cache_dir": str(folder / "mel"),
        "val_video_path": str(folder / "validation.mp4"),
        "val_audio_path": str(folder / "validation.wav"),
    }
    stage["ckpt"] |= {"resume_ckpt_path": "", "save_ckpt_steps": STEPS_BETWEEN_CHECKPOINTS}
    stage["run"] |= {"max_train_steps": STEPS, "inference_steps": 1}
    stage["model"] |= {"block_out_channels": [32, 32, 64, 64], "sample_size": 8}
    stage_path.write_text(yaml.safe_dump(stage))

    syncnet_path = checkout / stage["data"]["syncnet_config_path"]
    syncnet = yaml.safe_load(syncnet_path.read_text())
    for name in ("audio_encoder", "visual_encoder"):
        encoder = syncnet["model"][name]
        # its last two levels have 1 x 1 pixels: a group of one number is NaN in fp16
        small = len(encoder["block_out_channels"]) - 2
        encoder["block_out_channels"] = [32] * small + [256] * 2
    syncnet_path.write_text(yaml.safe_dump(syncnet))

    _make_films(folder)
    _make_models(checkout, syncnet)
    _make_faces(checkout / "checkpoints/auxiliary/models/buffalo_l")


def _make_films(folder: Path) -> None:
    clips = [folder / f"{number}.mp4" for number in range(CLIPS)]
    for number, clip in enumerate(clips):
        _make_film(clip, CLIP_S, tone_hz=200 + 50 * number)
    (folder / "clips.txt").write_text("\n".join(map(str, clips)))
    film = folder / "validation.mp4"
    _make_film(film, 0.8, tone_hz=300)
    _ffmpeg("-i", film, "-vn", "-ar", "16000", film.with_suffix(".wav"))


def _make_film(path: Path, duration_s: float, tone_hz: int) -> None:
    picture = f"testsrc2=size=256x256:rate=25:duration={duration_s}"
    sound = f"sine=frequency={tone_hz}:sample_rate=16000:duration={duration_s}"
    inputs = ("-f", "lavfi", "-i", picture, "-f", "lavfi", "-i", sound)
    _ffmpeg(*inputs, "-c:v", "libx264", "-pix_fmt", "yuv420p", "-c:a", "aac", "-shortest", path)


def _ffmpeg(*words: str | Path) -> None:
    subprocess.run(["ffmpeg", "-y", "-loglevel", "error", *words], check=True, timeout=60)


def _make_models(checkout: Path, syncnet: Mapping[str, Any]) -> None:
    import torch
    from diffusers import AutoencoderKL
    from eval.detectors.s3fd.nets import S3FDNet
    from eval.syncnet.syncnet import S
    from latentsync.models.stable_syncnet import StableSyncNet
    from latentsync.trepa.third_party.VideoMAEv2 import videomaev2_finetune
    from latentsync.whisper.whisper.model import ModelDimensions, Whisper
    from torchvision.models import vgg16

    torch.manual_seed(0)
    auxiliary = checkout / "checkpoints/auxiliary"
    auxiliary.mkdir(parents=True)
    torch.save(S(num_layers_in_fc_layers=1024).state_dict(), auxiliary / "syncnet_v2.model")
    torch.save(S3FDNet(device="cpu").state_dict(), auxiliary / "sfd_face.pth")
    trained = StableSyncNet(syncnet["model"]).state_dict()
    torch.save({"state_dict": trained}, checkout / syncnet["ckpt"]["inference_ckpt_path"])

    # as the script asks for it; site/sitecustomize.py makes it small
    videomae = videomaev2_finetune.vit_giant_patch14_224(
        img_size=224,
        num_classes=174,
        all_frames=16,
        tubelet_size=2,
        drop_path_rate=0.3,
        use_mean_pooling=True,
    )
    weights = {"module": videomae.state_dict()}
    torch.save(weights, auxiliary / "vit_g_hybrid_pt_1200e_ssv2_ft.pth")

    # cross_attention_dim of the stage's file fixes the encoder's width and its four layers
    sizes = {"n_mels": 80, "n_audio_ctx": 1500, "n_audio_state": 384, "n_audio_head": 6}
    sizes |= {"n_audio_layer": 4, "n_vocab": 64, "n_text_ctx": 448, "n_text_state": 384}
    sizes |= {"n_text_head": 6, "n_text_layer": 1}
    whisper = Whisper(ModelDimensions(**sizes))
    (checkout / "checkpoints/whisper").mkdir()
    weights = {"dims": sizes, "model_state_dict": whisper.state_dict()}
    torch.save(weights, checkout / "checkpoints/whisper/tiny.pt")

    # LPIPS takes the convolutions alone: each other weight is one number, seen as many
    vgg = {}
    for name, weight in vgg16().state_dict().items():
        is_convolution = name.startswith("features")
        vgg[name] = weight.clone() if is_convolution else torch.zeros(1).expand(weight.shape)
    hub = Path(os.environ["TORCH_HOME"]) / "hub/checkpoints"
    hub.mkdir(parents=True)
    torch.save(vgg, hub / "vgg16-397923af.pth")

    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[32] * 4,
        layers_per_block=1,
        sample_size=64,
    )
    repository = Path(os.environ["HF_HOME"]) / "hub/models--stabilityai--sd-vae-ft-mse"
    vae.save_pretrained(repository / "snapshots" / HUB_REVISION)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(HUB_REVISION)


def _make_faces(folder: Path) -> None:
    """Two networks as insightface loads them, which see one face in the middle of each picture."""
    import numpy as np

    folder.mkdir(parents=True)
    anchors = [2 * (512 // stride) ** 2 for stride in (8, 16, 32)]
    scores = [np.zeros((count, 1), "float32") for count in anchors]
    scores[-1][2 * (16 * 8 + 8)] = 0.9  # of the coarsest 16 x 16 places, the one in the middle
    boxes = [np.tile(np.float32([3, 4, 3, 4]), (count, 1)) for count in anchors]
    points = [np.zeros((count, 10), "float32") for count in anchors]
    _save_constants(folder / "det.onnx", [1, 3, "h", "w"], [*scores, *boxes, *points])
    landmarks = np.random.default_rng(0).normal(0, 0.02, (106, 2)).astype("float32")
    landmarks += (0, 0.3)
    landmarks[33:52] += (-0.3, -0.6)  # the left eye
    landmarks[87:106] += (0.3, -0.6)  # the right eye
    _save_constants(folder / "landmarks.onnx", [1, 3, 192, 192], [landmarks.reshape(1, 212)])


def _save_constants(path: Path, input_shape: Sequence[int | str], outputs: Sequence[Any]) -> None:
    from onnx import TensorProto, helper, numpy_helper, save

    nodes = []
    names = []
    for number, array in enumerate(outputs):
        name = f"output{number}"
        constant = numpy_helper.from_array(array)
        nodes.append(helper.make_node("Constant", [], [name], value=constant))
        names.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape))
    inputs = [helper.make_tensor_value_info("picture", TensorProto.FLOAT, input_shape)]
    graph = helper.make_graph(nodes, "face", inputs, names)
    operators = [helper.make_opsetid("", 17)]
    save(helper.make_model(graph, opset_imports=operators, ir_version=9), path)


if __name__ == "__main__":
    sys.path[0] = sys.argv[2]  # this file has the name of the project's package
    make(Path(sys.argv[1]), Path(sys.argv[2]))
