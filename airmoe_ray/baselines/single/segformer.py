"""SegFormer: a hierarchical transformer and a head of linear layers, in transformers' implementation."""

from torch import Tensor, nn

from airmoe_ray.baselines.single.layers import grid_of, resize
from airmoe_ray.baselines.single.mix_transformer import segformer_config, transformers_segformer


class SegFormer(nn.Module):
    """SegFormer-B0 (Xie et al. 2021), from scratch instead of from ImageNet weights."""

    def __init__(self, classes: int):
        super().__init__()
        config = segformer_config("b0", num_labels=classes)
        self.model = transformers_segformer().SegformerForSemanticSegmentation(config)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        logits_BCyx = self.model(images_B3HW).logits  # at stride 4
        return resize(logits_BCyx, grid_of(images_B3HW))
