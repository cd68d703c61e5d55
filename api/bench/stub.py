"""The system without its arithmetic: tensors of true shape through every hop, no backbone and no convolution.

`python -m api.bench.stub RUN PORT` serves it; what a request takes then is what distribution and HTTP cost.
"""

import sys
import time
from pathlib import Path

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from actors.processes.cloud import Cloud
from actors.processes.expert_host import ExpertHost, host_actor
from actors.rounds.messages import Array, Forward, HostReport, HostStatistic, Read, Transmit
from actors.serving.system import System
from airmoe_ray.features.backbone import FeatureMaps
from airmoe_ray.storage.checkpoint import load_checkpoint
from api.http.server import serve


class StubCloud(Cloud):
    """Features come from nowhere."""

    def maps(self, images_BHW3: NDArray[np.uint8]) -> FeatureMaps:
        """The right shape, and something of each image in it, so that routing has something to tell apart."""
        batch, height, width, _ = images_BHW3.shape
        stride = self.backbone.stride
        shade_B = torch.from_numpy(images_BHW3[:, ::64, ::64].mean(axis=(1, 2, 3)) / 255.0).float()
        grid = (height // stride, width // stride)
        features_BDhw = shade_B[:, None, None, None].expand(batch, self.backbone.dim, *grid).contiguous()
        return FeatureMaps(features_BDhw.to(self.device))


class StubExpert(ExpertHost):
    """A client that answers at once, with arrays of true shape."""

    def read(self, message: Read) -> HostStatistic:
        """A flat statistic, nobody faded."""
        (batch, d), clients = message.query_dist_Bd.shape, len(self.spec.clients)
        flat_Bnd = np.full((batch, clients, d), 1.0 / d, dtype=np.float32)
        faded_Bn, versions = np.zeros((batch, clients), dtype=bool), tuple(self.frls.versions)
        return HostStatistic(flat_Bnd, faded_Bn, versions, self.process, time.monotonic())

    def forward(self, message: Forward, features_BDhw: Array) -> HostReport:
        """Features arrive, nothing is computed."""
        self.grid = features_BDhw.shape[2:]
        pairs = len(message.sample_P)
        return HostReport(np.full(pairs, 0.1, dtype=np.float32), np.ones(pairs, dtype=np.float32))

    def transmit(self, message: Transmit) -> Array:
        """Symbols of nothing."""
        return np.ones((len(message.sample_P), len(self.spec.card.classes), *self.grid), dtype=np.complex64)


def main() -> None:
    """Serve until the process is stopped."""
    run, port = Path(sys.argv[1]), int(sys.argv[2])
    config, _ = load_checkpoint(run / "checkpoint")
    system = System(run / "checkpoint", config, expert_actor=host_actor(StubExpert), cloud_actor=ray.remote(StubCloud))
    serve(system, run / "state", "127.0.0.1", port)


if __name__ == "__main__":
    from api.bench.stub import main as importable_main  # workers must find the classes under their real name

    importable_main()
