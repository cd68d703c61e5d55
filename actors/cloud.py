"""The cloud as an actor: backbone, query, routing, fusion weights and receiver around the clients' exchanges.

Suffixes: B inputs, N clients, K routed, C classes, h w grid.
"""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.clients import Begun, RayClients
from actors.cluster import node_ip
from actors.errors import RosterNeededError
from actors.messages import BatchAnswer, Settings
from actors.roster import Roster
from actors.round import RayRound
from actors.wire import Receiver
from airmoe_ray.backbone import load_backbone
from airmoe_ray.checkpoint import ModelCard, load_cloud, parse_tensors
from airmoe_ray.config import Config
from airmoe_ray.device import pick_device
from airmoe_ray.errors import CheckpointError
from airmoe_ray.experts import shared_head
from airmoe_ray.features import to_tensor
from airmoe_ray.moe import AirMoEOutput, collaborate
from airmoe_ray.query import Query
from airmoe_ray.rng import torch_generator

Array = NDArray[Any]


@dataclass(frozen=True)
class CloudSpec:
    """What a cloud needs besides its file."""

    config: Config
    card: ModelCard


class Cloud(Receiver):
    """Runs the algorithm box on batches of images with the clients of a roster."""

    def __init__(self, spec: CloudSpec, content: bytes) -> None:
        self.config, self.card = spec.config, spec.card
        self.threads = spec.config.cluster.cloud_threads or os.cpu_count() or 1
        self.device = pick_device("auto", threads=1)
        self.backbone = load_backbone(spec.config.backbone).to(self.device)
        if self.backbone.fingerprint != spec.card.backbone_fingerprint:
            raise CheckpointError(
                f"the run was trained on features of another backbone ({spec.card.backbone_name} "
                f"{spec.card.backbone_fingerprint[:8]}, now {self.backbone.fingerprint[:8]}); restore or retrain"
            )
        self.query = Query(
            spec.card.feature_dim,
            spec.config.frl.dim,
            temperature=spec.config.routing.norm_temperature,
            generator=torch_generator(spec.config.seed, "init/query"),
        )
        self.dtype = next(iter(parse_tensors(content, "cloud").values())).dtype
        self.shared = shared_head(
            spec.config,
            feature_dim=spec.card.feature_dim,
            classes=len(spec.card.classes),
            dilations=spec.card.dilation_rates,
        )
        for part in (self.query, self.shared):
            if part is not None:
                part.eval().to(self.device, self.dtype)
        load_cloud(self.query, self.shared, content, "cloud.safetensors")
        self.clients: RayClients | None = None
        self._batches = 0  # under way here
        self._batches_lock = threading.Lock()
        # Always the same thread for batches that are alone: each thread has its own team of OpenMP threads, and once
        # all teams together outnumber the cores, every barrier sleeps instead of spinning.
        self._wide = ThreadPoolExecutor(1)

    def segment(
        self,
        images_BHW3: NDArray[np.uint8],
        ids_B: tuple[int, ...],
        settings: Settings,
        roster_version: int,
        time_left_s: float,
    ) -> BatchAnswer:
        """One batch from pixels to fused logits, with the clients of this roster or a newer one.

        A batch that is alone gets all cores, for latency; several get one each, for throughput: threads of one
        operation wait for each other at its end, and where other batches keep the cores busy they wait long.
        """
        ends_at = time.monotonic() + time_left_s
        clients = self.clients
        if clients is None or clients.roster.version < roster_version:
            raise RosterNeededError("the cloud has not met these clients")
        clients = clients.until(ends_at)
        with self._batches_lock:
            self._batches += 1
            alone = self._batches == 1
        try:
            if not alone:
                return self._segment(images_BHW3, ids_B, settings, clients, threads=1)
            return self._wide.submit(
                self._segment, images_BHW3, ids_B, settings, clients, threads=self.threads
            ).result()
        finally:
            with self._batches_lock:
                self._batches -= 1

    @torch.inference_mode()
    def _segment(
        self,
        images_BHW3: NDArray[np.uint8],
        ids_B: tuple[int, ...],
        settings: Settings,
        clients: RayClients,
        *,
        threads: int,
    ) -> BatchAnswer:
        torch.set_num_threads(threads)  # of the calling thread
        started = time.perf_counter()
        round_ = clients.begin(ids_B, settings.channel)
        features_BDhw = self.features(images_BHW3)
        own = round_.meanwhile(self.shared, features_BDhw)
        query_dist_Bd = self.query(features_BDhw)
        encoded = time.perf_counter()
        output = collaborate(
            query_dist_Bd,
            features_BDhw,
            ids_B,
            Begun(round_),
            routing_config=settings.routing,
            channel=settings.channel,
            seed=self.config.seed,
            shared=own,
        )
        if settings.renew:
            output.round.renew()
        clients.finished.append(output.round.name)
        timings = {"backbone": 1e3 * (encoded - started), **output.round.timings_ms}
        whole = 1e3 * (time.perf_counter() - started)
        return _pack(output, timings | {"route": whole - sum(timings.values())})

    def connect(self, roster: Roster) -> None:
        """Meet the clients of a new roster."""
        if self.clients is None or roster.version > self.clients.roster.version:
            call_s = self.config.cluster.call_deadline_s
            self.clients = RayClients(roster, classes=len(self.card.classes), call_s=call_s)

    def features(self, images_BHW3: NDArray[np.uint8]) -> Tensor:
        """F = ViT(D), Eq. (1)."""
        images_B3HW = to_tensor(list(images_BHW3)).to(self.device)
        return self.backbone(images_B3HW).to(self.dtype)

    def state(self) -> dict[str, Any]:
        """Where the cloud lives."""
        context = ray.get_runtime_context()
        return {
            "node": node_ip(),
            "gpu_ids": [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])],
            "device": str(self.device),
            "pid": os.getpid(),
            "pad_multiple": self.backbone.pad_multiple,
        }


def _pack(output: AirMoEOutput[RayRound], timings_ms: dict[str, float]) -> BatchAnswer:
    routing, round_ = output.routing, output.round
    return BatchAnswer(
        logits_BChw=output.logits_BChw.float().cpu().numpy(),
        js_BN=routing.js_BN.cpu().numpy(),
        score_BN=routing.score_BN.cpu().numpy(),
        prob_BN=routing.prob_BN.cpu().numpy(),
        selected_BK=routing.selected_BK.cpu().numpy(),
        transmit_BK=routing.transmit_BK.cpu().numpy(),
        beta_BK=output.beta_BK.cpu().numpy(),
        rho_B=output.rho_B.cpu().numpy(),
        nmse_B=output.nmse_B.cpu().numpy(),
        faded_BN=round_.faded_BN.numpy(),
        present_N=round_.present_N.numpy(),
        all_faded_B=routing.all_faded_B.cpu().numpy(),
        skipped_B=round_.skipped_B,
        versions=round_.versions,
        faults=round_.faults,
        heard=round_.heard,
        sealed_gamma_BK=round_.sealed_gamma_BK,
        timings_ms=timings_ms,
    )


CloudActor = ray.remote(Cloud)
