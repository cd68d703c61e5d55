"""SegFormer's hierarchical encoder, MiT, as `transformers` has it; from scratch, nothing is fetched."""

from typing import Any

from airmoe_ray.errors import UserError

# per size: channels at strides 4, 8, 16, 32, and blocks at each
SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "b0": ((32, 64, 160, 256), (2, 2, 2, 2)),
    "b5": ((64, 128, 320, 512), (3, 6, 40, 3)),
}


def transformers_segformer() -> Any:
    """The `transformers` package, or one line that says how to get it."""
    import airmoe_ray.runtime.torchvision_import  # noqa: F401  transformers may import torchvision

    try:
        import transformers
    except ImportError:
        raise UserError(
            "SegFormer and HRDA need transformers, which is not installed; pip install 'airmoe-ray[experiments]'"
        ) from None
    return transformers


def segformer_config(size: str, **settings: Any) -> Any:
    """A configuration of MiT in one of its sizes."""
    channels, blocks = SIZES[size]
    return transformers_segformer().SegformerConfig(hidden_sizes=channels, depths=blocks, **settings)
