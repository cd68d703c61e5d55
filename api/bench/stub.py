"""The system without its arithmetic: tensors of true shape through every hop, no backbone and no convolution.

`python -m api.bench.stub RUN PORT` serves it; what a request takes then is what distribution and HTTP cost.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.cloud import Cloud
from actors.expert import ExpertHost
from actors.host import Statistic
from actors.system import System
from airmoe_ray.checkpoint import load_checkpoint
from airmoe_ray.config import ChannelConfig
from api.server import serve

Array = NDArray[Any]


class StubCloud(Cloud):
    """Features come from nowhere."""

    def features(self, images_BHW3: NDArray[np.uint8]) -> Tensor:
        """The right shape, and something of each image in it, so that routing has something to tell apart."""
        batch, height, width, _ = images_BHW3.shape
        stride = self.backbone.stride
        shade_B = torch.from_numpy(images_BHW3[:, ::64, ::64].mean(axis=(1, 2, 3)) / 255.0).float()
        grid = (height // stride, width // stride)
        return shade_B[:, None, None, None].expand(batch, self.backbone.dim, *grid).contiguous().to(self.device)


class StubExpert(ExpertHost):
    """A client that answers at once, with arrays of true shape."""

    def read(
        self, round_id: str, query_dist_Bd: Array, gamma_Bn: Array, channel: ChannelConfig, finished: Sequence[str] = ()
    ) -> Statistic:
        """A flat statistic, nobody faded."""
        batch, clients = gamma_Bn.shape
        flat_Bnd = np.full((batch, clients, query_dist_Bd.shape[1]), 1.0 / query_dist_Bd.shape[1], dtype=np.float32)
        return Statistic(flat_Bnd, np.zeros((batch, clients), dtype=bool), tuple(self.versions))

    def forward(
        self, round_id: str, features_BDhw: Array, query_dist_Bd: Array, sample_P: Array, client_P: Array
    ) -> tuple[Array, Array]:
        """Features arrive, nothing is computed."""
        self.grid = features_BDhw.shape[2:]
        return np.full(len(sample_P), 0.1, dtype=np.float32), np.ones(len(sample_P), dtype=np.float32)

    def transmit(self, round_id: str, sample_P: Array, client_P: Array, beta_P: Array, rho_P: Array) -> Array:
        """Symbols of nothing."""
        return np.ones((len(sample_P), len(self.spec.card.classes), *self.grid), dtype=np.complex64)


def main() -> None:
    """Serve until told to stop."""
    run, port = Path(sys.argv[1]), int(sys.argv[2])
    config, _ = load_checkpoint(run / "checkpoint")
    system = System(run / "checkpoint", config, expert_actor=ray.remote(StubExpert), cloud_actor=ray.remote(StubCloud))
    serve(system, run / "state", "127.0.0.1", port)


if __name__ == "__main__":
    from api.bench.stub import main as importable_main  # workers must find the classes under their real name

    importable_main()
