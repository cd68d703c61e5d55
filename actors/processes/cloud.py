"""The cloud as an actor: backbone, query, routing, fusion weights and receiver around the clients' exchanges.

Suffixes: B inputs, N clients, K routed, C classes, h w grid.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.cluster.gpus import assigned_gpus, own_device
from actors.errors import NoExpertsError, NotFiniteError, RosterNeededError
from actors.rounds.calls import Endpoint, Pinned
from actors.rounds.messages import BatchResult, CloudSpec, CloudState, Segment
from actors.rounds.patience import Patience
from actors.rounds.ray_clients import Begun, RayClients
from actors.rounds.ray_round import RayRound
from actors.rounds.replies import Overdue
from actors.rounds.roster import Roster
from airmoe_ray.features.backbone import FeatureMaps
from airmoe_ray.features.preprocess import to_tensor
from airmoe_ray.inference.segmenter import load_matching_backbone
from airmoe_ray.model.cloud_parts import cloud_parts
from airmoe_ray.model.moe import collaborate
from airmoe_ray.model.routing import NobodyPresentError
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.storage.checkpoint import compute_dtype, load_cloud, parse_tensors

_WARM_UP_SIDE = 1024  # beyond, an image takes seconds wherever it comes in the row


class Cloud(Endpoint):
    """Runs one round per batch of images, with the clients of a roster."""

    def __init__(self, spec: CloudSpec, content: bytes, weights: Pinned | None = None) -> None:
        """`content` is the cloud's file of the checkpoint, `weights` the backbone's, where they are a file."""
        self.config, self.card = spec.config, spec.card
        self.threads = spec.config.cluster.cloud_threads or os.cpu_count() or 1
        self.device = own_device(threads=1)
        file = None if weights is None else weights.get()
        self.backbone = load_matching_backbone(spec.config, spec.card, file).to(self.device)
        self.dtype = compute_dtype(next(iter(parse_tensors(content, "cloud").values())))
        parts = cloud_parts(
            spec.config,
            feature_dim=spec.card.feature_dim,
            classes=len(spec.card.classes),
            dilations=spec.card.dilation_rates,
            fine_dims=spec.card.fine_dims,
        )
        for part in parts:
            if part is not None:
                part.eval().to(self.device, self.dtype)
        load_cloud(parts, content, "cloud.safetensors")
        self.parts = parts
        self.clients: RayClients | None = None
        self.overdue = Overdue(Patience(spec.config.cluster.call_deadline_s))
        self._batches = 0  # under way here
        self._batches_lock = threading.Lock()
        # Always the same thread for batches that are alone: each thread has its own team of OpenMP threads, and once
        # all teams together outnumber the cores, every barrier sleeps instead of spinning.
        self._wide = ThreadPoolExecutor(1)
        self._wide.submit(self._warm_up).result()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """One image through the backbone, of the size that is served: kernels are chosen and memory is fetched by it.

        So the first request does not pay for it, nor the first after a restart. Hosts start meanwhile, and take longer.
        """
        side, step = min(self.config.data.image_size, _WARM_UP_SIDE), self.backbone.pad_multiple
        height, width = (-(-length // step) * step for length in (side * 3 // 4, side))
        with _threads(self.threads):
            self.maps(np.zeros((1, height, width, 3), dtype=np.uint8))

    def receive(self, message: Segment, *beside: Any) -> object:
        """Segment a batch: the one message that the cloud takes."""
        return self.segment(message, *beside)

    def segment(self, message: Segment, images_BHW3: NDArray[np.uint8]) -> BatchResult:
        """One batch from pixels to fused logits, with the clients of this roster or a newer one.

        A batch that is alone gets all cores, for latency; several get one each, for throughput: threads of one
        operation wait for each other at its end, and where other batches keep the cores busy they wait long.
        """
        ends_at = time.monotonic() + message.time_left_s
        clients = self.clients
        if clients is None or clients.roster.version < message.roster_version:
            raise RosterNeededError("the cloud does not know these clients yet")
        clients = clients.for_requests(message.tickets_B, message.snr_db_B, ends_at=ends_at)
        with self._batches_lock:
            self._batches += 1
            alone = self._batches == 1
        try:
            if not alone:
                return self._segment(message, images_BHW3, clients, threads=1)
            return self._wide.submit(self._segment, message, images_BHW3, clients, threads=self.threads).result()
        finally:
            with self._batches_lock:
                self._batches -= 1

    @torch.inference_mode()
    def _segment(
        self, message: Segment, images_BHW3: NDArray[np.uint8], clients: RayClients, *, threads: int
    ) -> BatchResult:
        started = time.perf_counter()
        settings = message.settings
        round_ = clients.begin(message.ids_B, settings.channel)
        with _threads(threads):
            features_BDhw, fine = self.maps(images_BHW3)
        shared = round_.overlapped(_wide(settings.participants.head(self.parts.shared), threads), features_BDhw)
        query_dist_Bd = self.parts.query(features_BDhw)
        _check_finite(query_dist_Bd, features_BDhw)
        encoded = time.perf_counter()
        try:
            output = collaborate(
                query_dist_Bd,
                features_BDhw,
                message.ids_B,
                Begun(round_),
                routing_config=settings.routing,
                channel=settings.channel,
                seed=self.config.seed,
                shared=shared,
                refine=_wide(self.parts.refine(fine), threads),
                participants=settings.participants,
                gate=self.parts.gate,
                top_k_B=message.top_k_B,
            )
            if settings.renew:
                output.round.renew()
        except NobodyPresentError as error:
            raise NoExpertsError(str(error), round_.replies.take_news()) from None
        except Exception:
            round_.replies.leave_untold()
            raise
        clients.finished.append(output.round.id)
        timings = {"backbone": 1e3 * (encoded - started), **output.round.timings_ms}
        whole = 1e3 * (time.perf_counter() - started)
        return _batch_result(output, timings | {"route": whole - sum(timings.values())})

    def connect(self, roster: Roster) -> None:
        """Work with the clients of this roster from now on, unless a newer one has come."""
        if self.clients is None or roster.version > self.clients.roster.version:
            self.clients = RayClients(roster, classes=len(self.card.classes), overdue=self.overdue)
            self.overdue.retain(host.key for host in roster.hosts)

    def maps(self, images_BHW3: NDArray[np.uint8]) -> FeatureMaps:
        """F = ViT(D), Eq. (7), and the finer maps where there is a refiner."""
        images_B3HW = to_tensor(list(images_BHW3), self.device)
        features_BDhw, fine = self.backbone.maps(images_B3HW, fine=self.parts.refiner is not None)
        return FeatureMaps(features_BDhw.to(self.dtype), tuple(map_BDyx.to(self.dtype) for map_BDyx in fine))

    def state(self) -> CloudState:
        """Where the cloud runs, and what images it wants."""
        return CloudState(assigned_gpus(), self.backbone.pad_multiple)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many cores for the block, and one afterwards, of the calling thread.

    Query, divergences and weights are thousands of numbers: two threads would wait for each other longer than they
    work, by milliseconds each time where other processes keep the cores busy.
    """
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def _wide(network: Callable[[Tensor], Tensor] | None, threads: int) -> Callable[[Tensor], Tensor] | None:
    """The same network, on so many cores."""
    if network is None:
        return None

    def run(maps_BDhw: Tensor) -> Tensor:
        with _threads(threads):
            return network(maps_BDhw)

    return run


def _check_finite(query_dist_Bd: Tensor, features_BDhw: Tensor) -> None:
    """Raise before clients are asked about what is no number: they would be blamed for it."""
    sums_B = query_dist_Bd.sum(dim=1) + features_BDhw.sum(dim=(1, 2, 3), dtype=torch.float64)
    if rows := tuple((~torch.isfinite(sums_B)).nonzero()[:, 0].tolist()):
        raise NotFiniteError("the backbone's features of this image are not finite", rows)


def _batch_result(output: AirMoEOutput[RayRound], timings_ms: dict[str, float]) -> BatchResult:
    routing, round_ = output.routing, output.round
    return BatchResult(
        logits_BChw=output.logits_BChw.float().cpu().numpy(),
        grid=(output.coarse_BChw.shape[2], output.coarse_BChw.shape[3]),
        js_BN=routing.js_BN.cpu().numpy(),
        score_BN=routing.score_BN.cpu().numpy(),
        prob_BN=routing.prob_BN.cpu().numpy(),
        selected_BK=routing.selected_BK.masked_fill(~routing.wanted_BK, -1).cpu().numpy(),
        transmit_BK=routing.transmit_BK.cpu().numpy(),
        beta_BK=output.beta_BK.cpu().numpy(),
        rho_B=output.rho_B.cpu().numpy(),
        nmse_B=output.nmse_B.cpu().numpy(),
        faded_BN=round_.faded_BN.numpy(),
        present_N=round_.present_N.numpy(),
        all_faded_B=routing.all_faded_B.cpu().numpy(),
        skipped_B=round_.skipped_B,
        versions=round_.versions,
        renewed_B=[tuple(sorted(renewed)) for renewed in round_.renewed_B],
        faults=round_.replies.take_news(),
        heard=round_.heard,
        processes=round_.processes,
        calls=round_.replies.calls + 1,  # and the one that brought the batch
        sealed_gamma_BK=round_.sealed_gamma_BK,
        timings_ms=timings_ms,
    )


CloudActor = ray.remote(Cloud)
