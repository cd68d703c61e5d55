"""Segment every image of a folder, in this process, without a server.

python examples/segment_folder.py photos/ --out segmented/
"""

import argparse
from pathlib import Path

from PIL import Image

from airmoe_ray import Segmenter
from airmoe_ray.errors import UserError


def main() -> None:
    """Write NAME_overlay.png and NAME_mask.png (class ids) of each image; what is no image is told and left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("segmented"))
    parser.add_argument("--run", default="street", help="a shipped model, a run folder or a hub id")
    options = parser.parse_args()
    segmenter = Segmenter.from_pretrained(options.run)
    options.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(path for path in options.folder.iterdir() if path.is_file()):
        try:
            answer = segmenter(path)
        except UserError as error:
            print(f"left out: {error}")
            continue
        answer.overlay().save(options.out / f"{path.stem}_overlay.png")
        Image.fromarray(answer.mask).save(options.out / f"{path.stem}_mask.png")
        print(path.name, answer)


if __name__ == "__main__":
    main()
