"""A mixture in which one client holds your own photographs, and the others drawings in five weathers.

MINE/images/*.jpg and MINE/labels/*.png, labels being class ids of the scenes' classes (255: nobody knows). Every client
fills its memory from its own data alone before they train together, so that images like yours find your client.

python examples/own_client.py MINE --run runs/own-client
"""

import argparse
import shutil
from pathlib import Path

from PIL import Image

from airmoe_ray import Segmenter
from airmoe_ray.config_file import load_config
from airmoe_ray.data.scenes import CLASSES, DOMAINS, render_scene
from airmoe_ray.training.run import train_run

MINE = "mine"


def join(mine: Path, folder: Path, *, drawn: int) -> Path:
    """One dataset of both: sub-folders of images/ are domains, and with as many clients each client holds one."""
    for part in ("images", "labels"):
        shutil.copytree(mine / part, folder / part / MINE)
    for index in range(drawn):
        scene = render_scene(index)
        for part, pixels in (("images", scene.image), ("labels", scene.label)):
            place = folder / part / DOMAINS[scene.domain] / f"{scene.name}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place)
    lines = (f"{name}, {r}, {g}, {b}" for name, (r, g, b) in zip(CLASSES.names, CLASSES.palette, strict=True))
    (folder / "classes.txt").write_text("\n".join(lines) + "\n")
    return folder


def main() -> None:
    """Train the mixture, then print how often the client of one's own data is chosen for images of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mine", type=Path)
    parser.add_argument("--run", type=Path, default=Path("runs/own-client"))
    parser.add_argument("--drawn", type=int, default=200, help="drawings of the other clients")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting; repeatable")
    options = parser.parse_args()
    data = join(options.mine, options.run / "data", drawn=options.drawn)
    domains = sorted([*DOMAINS, MINE])
    settings = ["data.name=folder", f"data.root={data}", f"experts.count={len(domains)}", "train.engine=local"]
    train_run(load_config("quickstart", [*settings, *options.set]), options.run)
    segmenter, own = Segmenter.from_pretrained(options.run), domains.index(MINE)
    for domain in domains:
        images = sorted((data / "images" / domain).iterdir())[:20]
        chosen = sum(segmenter(image).routing[own].selected for image in images)
        print(f"{domain}: client {own}, of your own data, is chosen for {chosen} of {len(images)}")


if __name__ == "__main__":
    main()
