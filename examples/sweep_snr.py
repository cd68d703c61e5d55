"""How much noise the answer bears: one image over channels of many SNRs, compared with a channel that is perfect.

python examples/sweep_snr.py photo.jpg
"""

import argparse

from airmoe_ray import Segmenter
from airmoe_ray.data.scenes import render_scene


def main() -> None:
    """Print, for each SNR, the error of what was received and the share of pixels whose class it left alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", nargs="?", help="default: a drawn street")
    parser.add_argument("--run", default="street", help="a shipped model, a run folder or a hub id")
    parser.add_argument("--snr-db", type=float, nargs="+", default=[-20, -10, 0, 10, 20, 30])
    parser.add_argument("--seeds", type=int, default=5, help="draws of fading and noise to average over")
    options = parser.parse_args()
    segmenter = Segmenter.from_pretrained(options.run)
    image = options.image or render_scene(0, height=384, width=512).image
    perfect = segmenter(image, channel="ideal").mask
    print("SNR [dB]   NMSE        pixels as over a perfect channel")
    for snr_db in options.snr_db:
        answers = [segmenter(image, snr_db=snr_db, seed=seed) for seed in range(options.seeds)]
        nmse = sum(answer.channel.nmse for answer in answers) / len(answers)
        same = sum((answer.mask == perfect).mean() for answer in answers) / len(answers)
        print(f"{snr_db:8.0f}   {nmse:9.2e}   {same:6.1%}")


if __name__ == "__main__":
    main()
