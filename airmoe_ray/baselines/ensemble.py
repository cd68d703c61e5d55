"""An ensemble: as many heads as answer an image with AirMoE, each trained by itself, averaged."""

from airmoe_ray.baselines.method import Method, Setting, changed
from airmoe_ray.baselines.single_head import alone
from airmoe_ray.config import Config


class Ensemble(Method):
    """K heads (K + 1 beside a cloud's head) from different starts on the same batches."""

    name, title, group = "ensemble", "ensemble of K heads", "control"
    about = "K heads that learn from all images, each from its own loss, and whose logits are averaged (+head: K + 1)"

    def configure(self, base: Config, setting: Setting) -> Config:
        heads = base.routing.top_k + self.head
        one = alone(base, hidden=base.experts.hidden, width=base.experts.width)
        return changed(one, {"experts.count": heads, "routing.top_k": heads, "train.objective": "each"})
