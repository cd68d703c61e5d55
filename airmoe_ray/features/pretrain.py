"""How the weights of `backbone.name: embedded` were made, and can be made again: `airmoe pretrain`.

The small ViT learns to predict the dense features of a frozen ImageNet EfficientNet-Lite0 on procedural street
scenes. No label is used, and the scenes come from an index range that neither training nor testing touches.

Suffixes: B inputs, S samples (rendered scenes), H W image, h w grid (cells of 8 pixels), T tokens, D features (160
of a token), y x another grid.
"""

import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from airmoe_ray.config import BackboneConfig
from airmoe_ray.data.base import UInt8Array
from airmoe_ray.data.scenes import SCENES_VERSION, render_scene
from airmoe_ray.errors import ConfigError
from airmoe_ray.features.backbone import EARLY_BLOCK, EMBEDDED_SIZE, embedded_vit, load_backbone, normed, to_grid

RECIPE = "1"
PRETRAIN_START = 1_000_000  # first scene index; training and test scenes lie below
POOL_SCENES = 3000  # rendered once, in the background, then cropped again and again
WARM_SCENES = 60  # rendered before the first step; the scale of the targets is taken from them
CELL = 8  # the ViT's patch [pixels]
PEAK_LR, WEIGHT_DECAY, WARM_UP = 1.2e-3, 0.05, 0.03
SAVE_EVERY_S, REPORT_EVERY_S = 240.0, 15.0
# (until this share of the time, crop height, crop width, batch). A step sees 1500 to 2300 tokens, few enough for many
# steps: small crops first, for variety; whole images last, for the long range.
STAGES = ((0.4, 96, 128, 8), (0.7, 128, 160, 6), (1.0, *EMBEDDED_SIZE, 3))

Progress = Callable[[dict[str, float]], None]


def pretrain(*, out: Path, minutes: float, seed: int, progress: Progress) -> dict[str, str]:
    """Train for `minutes` of wall time and write the weights to `out`; returns the metadata stored with them."""
    if not minutes > 0:
        raise ConfigError(f"{minutes} minutes of pretraining; give more than 0 (the shipped weights took 30)")
    teacher = Teacher()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        student = Student(teacher.channels)
    rng = np.random.default_rng(seed)
    decayed = [weight for weight in student.parameters() if weight.ndim > 1]
    plain = [weight for weight in student.parameters() if weight.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98))
    steps, loss_mean = 0, 0.0
    record = {"recipe": RECIPE, "teacher": "efficientnet_lite0", "seed": str(seed)}
    with _rendered_pool(PRETRAIN_START) as (pool_SHW3, ready):
        teacher.fit_scale(_as_images(pool_SHW3[:WARM_SCENES]))
        saved = reported = begin = time.monotonic()
        while (share := (time.monotonic() - begin) / (60 * minutes)) < 1:
            _, height, width, batch = next(stage for stage in STAGES if share < stage[0])
            images_B3HW, place = _draw(pool_SHW3[: ready.value], rng, height, width, batch)
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LR * min(share / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * share))
            loss = student(images_B3HW, place, teacher(images_B3HW))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            steps += 1
            # A mean over about the last hundred steps, without a start-up bias.
            loss_mean += (float(loss.detach()) - loss_mean) / min(steps, 100)
            now = time.monotonic()
            record |= {"steps": str(steps), "minutes": f"{(now - begin) / 60:.1f}", "loss": f"{loss_mean:.4f}"}
            record["scenes"] = f"v{SCENES_VERSION} {PRETRAIN_START}..{PRETRAIN_START + ready.value - 1}"
            if now - reported > REPORT_EVERY_S:
                reported = now
                progress({"share": share, "step": steps, "loss": loss_mean, "scenes": ready.value})
            if now - saved > SAVE_EVERY_S:
                saved = now
                _save(student.vit, out, record)
    _save(student.vit, out, record)
    return record


class Teacher:
    """EfficientNet-Lite0's maps at strides 4 to 32 on the student's grid, each channel in standard units."""

    def __init__(self) -> None:
        self._net: Any = load_backbone(BackboneConfig(name="efficientnet_lite0")).body.net
        self._scales: list[tuple[Tensor, Tensor]] = []
        # The image itself comes first: what the tokens of the early block should not forget. Four cells of the
        # stride-4 map go to each cell of the grid as they are, not pooled: they hold the outlines.
        self.channels = [3 * CELL**2, 4 * 24, 40, 112, 320]

    @torch.no_grad()
    def fit_scale(self, images_B3HW: Tensor) -> None:
        """Take mean and standard deviation of every channel from these images."""
        self._scales = [
            (map_BChw.mean(dim=(0, 2, 3), keepdim=True), map_BChw.std(dim=(0, 2, 3), keepdim=True) + 1e-3)
            for map_BChw in self._maps(images_B3HW)
        ]

    @torch.no_grad()
    def __call__(self, images_B3HW: Tensor) -> list[Tensor]:
        """Targets (B, T, C), from pixels to meaning."""
        maps = zip(self._maps(images_B3HW), self._scales, strict=True)
        return [((map_BChw - mean) / std).flatten(2).transpose(1, 2) for map_BChw, (mean, std) in maps]

    def _maps(self, images_B3HW: Tensor) -> list[Tensor]:
        images_B3HW = 2 * images_B3HW - 1
        s4, *coarser = self._net.forward_intermediates(images_B3HW, indices=[-4, -3, -2, -1], intermediates_only=True)
        grid = (images_B3HW.shape[2] // CELL, images_B3HW.shape[3] // CELL)
        fine = [F.pixel_unshuffle(images_B3HW, CELL), F.pixel_unshuffle(s4, 2)]
        return fine + [to_grid(map_BDyx, grid) for map_BDyx in coarser]


class Student(nn.Module):
    """The ViT with one linear head per target: early tokens predict the three finest, final tokens all but pixels."""

    def __init__(self, channels: list[int]) -> None:
        super().__init__()
        self.vit: Any = embedded_vit()
        self.early_heads = nn.ModuleList(nn.Linear(self.vit.embed_dim, count) for count in channels[:3])
        self.final_heads = nn.ModuleList(nn.Linear(self.vit.embed_dim, count) for count in channels[1:])

    def forward(self, images_B3HW: Tensor, place: tuple[int, int], targets: list[Tensor]) -> Tensor:
        """Mean loss over the heads for crops whose top left cell is `place` in the whole image."""
        early_BTD, final_BTD = self._tokens(2 * images_B3HW - 1, place)
        predictions = [head(early_BTD) for head in self.early_heads] + [head(final_BTD) for head in self.final_heads]
        wanted = targets[:3] + targets[1:]
        losses = [F.smooth_l1_loss(guess, truth) for guess, truth in zip(predictions, wanted, strict=True)]
        return torch.stack(losses).mean()

    def _tokens(self, images_B3HW: Tensor, place: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """As `forward_intermediates`, but a crop gets the positions of its own place, not a squeezed whole image."""
        tokens_BhwD = self.vit.patch_embed(images_B3HW)
        rows = slice(place[0], place[0] + tokens_BhwD.shape[1])
        columns = slice(place[1], place[1] + tokens_BhwD.shape[2])
        positions_1hwD = self.vit.pos_embed.unflatten(1, self.vit.patch_embed.grid_size)[:, rows, columns]
        tokens_BTD = early_BTD = (tokens_BhwD + positions_1hwD).flatten(1, 2)
        for index, block in enumerate(self.vit.blocks):
            tokens_BTD = block(tokens_BTD)
            if index == EARLY_BLOCK:
                early_BTD = tokens_BTD
        return normed(early_BTD), self.vit.norm(tokens_BTD)


def _draw(pool_SHW3: UInt8Array, rng: Generator, height: int, width: int, batch: int) -> tuple[Tensor, tuple[int, int]]:
    """Random scenes, cut at one random place on the cell grid, mirrored and recoloured at random."""
    top = int(rng.integers((EMBEDDED_SIZE[0] - height) // CELL + 1))
    left = int(rng.integers((EMBEDDED_SIZE[1] - width) // CELL + 1))
    rows, columns = slice(CELL * top, CELL * top + height), slice(CELL * left, CELL * left + width)
    chosen = rng.integers(len(pool_SHW3), size=batch)
    images_B3HW = _as_images(np.stack([pool_SHW3[index, rows, columns] for index in chosen]))
    mirrored = torch.from_numpy(rng.random((batch, 1, 1, 1)) < 0.5)
    images_B3HW = torch.where(mirrored, images_B3HW.flip(3), images_B3HW)
    gain = torch.from_numpy(np.exp(rng.normal(0, (0.2, 0.08, 0.08, 0.08), size=(batch, 4)))).float()
    colour_B311 = (gain[:, :1] * gain[:, 1:])[:, :, None, None]  # exposure, then white balance
    return (images_B3HW * colour_B311).clamp(0, 1), (top, left)


def _as_images(images_BHW3: UInt8Array) -> Tensor:
    return torch.from_numpy(images_BHW3).permute(0, 3, 1, 2).float() / 255


@contextmanager
def _rendered_pool(start: int) -> Iterator[tuple[UInt8Array, "Synchronized[int]"]]:
    """A file-backed array that another process fills with scenes, and how many are there already (at least some)."""
    context = multiprocessing.get_context("spawn")
    ready: Synchronized[int] = context.Value("i", 0)
    shape = (POOL_SCENES, *EMBEDDED_SIZE, 3)
    with tempfile.TemporaryDirectory(prefix="airmoe-pretrain-") as folder:
        path = Path(folder) / "scenes.npy"
        pool_SHW3 = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        painter = context.Process(target=_render, args=(path, start, ready), daemon=True)
        painter.start()
        try:
            while ready.value < WARM_SCENES:
                if not painter.is_alive():
                    raise RuntimeError(f"rendering scenes from {start} on ended with code {painter.exitcode}")
                time.sleep(0.1)
            yield pool_SHW3, ready
        finally:
            painter.terminate()
            painter.join()


def _render(path: Path, start: int, ready: "Synchronized[int]") -> None:
    pool_SHW3 = np.load(path, mmap_mode="r+")
    trainer = multiprocessing.parent_process()
    for number in range(len(pool_SHW3)):
        if trainer is not None and not trainer.is_alive():  # killed: nobody else would stop this process
            return
        pool_SHW3[number] = render_scene(start + number, height=EMBEDDED_SIZE[0], width=EMBEDDED_SIZE[1]).image
        ready.value = number + 1


def _save(vit: Any, out: Path, metadata: dict[str, str]) -> None:
    """Half precision, and complete at every moment: readers may come in the middle of the run."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    save_file({key: value.half().contiguous() for key, value in vit.state_dict().items()}, partial, metadata)
    partial.chmod(0o644)  # safetensors leaves it to its owner alone
    os.replace(partial, out)
