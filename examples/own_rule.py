"""A routing rule of one's own: who answers an image, decided by a function instead of by the configured score.

A rule sees what the cloud sees, the query Q (B, d) and the statistics P_j that the clients sent (B, N, d), and returns
what clients are sorted by (B, N); the K highest are routed.

python examples/own_rule.py photo.jpg
"""

import argparse

from torch import Tensor

from airmoe_ray import Segmenter
from airmoe_ray.data.scenes import render_scene
from airmoe_ray.model.statistics import entropy, js_divergence


def sure_and_near(query_dist_Bd: Tensor, stat_BNd: Tensor) -> Tensor:
    """Clients whose statistic is near the query, as in the paper, and sharp: whoever remembers something definite."""
    distance_BN = js_divergence(query_dist_Bd[:, None], stat_BNd)
    return -distance_BN - 0.5 * entropy(stat_BNd)


def main() -> None:
    """Print who answers by the model's own rule and by this one, and how much of the mask that changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?", help="default: a drawn street")
    parser.add_argument("--run", default="street", help="a shipped model, a run folder or a hub id")
    options = parser.parse_args()
    image = options.image or render_scene(0, height=384, width=512).image
    answers = {}
    for name, rule in (("the model's own rule", None), ("sure and near", sure_and_near)):
        answers[name] = Segmenter.from_pretrained(options.run, rule=rule)(image)
        heard = ", ".join(f"{c.id} {c.knows} ({c.weight:.2f})".replace("  ", " ") for c in answers[name].answered)
        print(f"{name}: clients {heard}")
    own, other = answers.values()
    print(f"{(own.mask != other.mask).mean():.1%} of the pixels differ")


if __name__ == "__main__":
    main()
