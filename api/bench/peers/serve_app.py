"""The same model as a Ray Serve composition: one deployment per expert, one for the cloud, a FastAPI ingress.

`python -m api.bench.peers.serve_app RUN PORT`, in an environment that has ray[serve]. As Serve's documentation says for
throughput: requests are batched at the cloud, calls of a batch go out together, handlers are asynchronous, work that
holds the processor goes to threads, and replicas take many requests at once. Threads are those of our own actors.

Suffixes: B inputs, N clients, K routed, d statistic, D features, C classes, h w grid.
"""

import asyncio
import os
import signal
import sys
from typing import Any

import numpy as np
import ray
import torch
from fastapi import FastAPI, Request, Response
from numpy.typing import NDArray
from ray import serve

from airmoe_ray.features.preprocess import to_tensor
from airmoe_ray.inference.decode import decode
from airmoe_ray.inference.masks import mask_of
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.model.client import answer_query, precode, report
from airmoe_ray.model.experts import ExpertOutput
from airmoe_ray.model.fusion import fusion_weights
from airmoe_ray.model.routing import keep_strongest, route, truncate
from airmoe_ray.radio.channel import deliver, draw_gamma, in_deep_fade
from airmoe_ray.radio.power import receive, receive_scale
from airmoe_ray.storage.shipped import find_model
from api.http.codec.encode import index_png

Array = NDArray[Any]
_MANY: dict[str, Any] = {"max_ongoing_requests": 64, "ray_actor_options": {"num_cpus": 0}}
app = FastAPI()


def _load(run: str, threads: int) -> Segmenter:
    segmenter = Segmenter.load(find_model(run).checkpoint)
    torch.set_num_threads(threads)
    return segmenter


@serve.deployment(**_MANY)
class Expert:
    """One client: its statistic, its expert's logits."""

    def __init__(self, run: str, client: int) -> None:
        segmenter = _load(run, threads=1)
        self.config, clients = segmenter.config, segmenter.model.clients
        self.expert, self.frl, self.client = clients.experts[client], clients.frl, client

    @torch.inference_mode()
    async def read(self, query_Bd: Array) -> Array:
        """P_j of each input."""
        temperature = self.config.routing.norm_temperature
        stat_BNd = answer_query(self.frl, torch.from_numpy(query_Bd.copy()), temperature=temperature).stat_BNd
        return stat_BNd[:, self.client].numpy()

    async def forward(self, features_BDhw: Array, query_Bd: Array, gain_B: Array) -> tuple[Array, Array, Array]:
        """y_j, delta_j and c_j of the inputs routed here."""
        return await asyncio.to_thread(self._forward, features_BDhw, query_Bd, gain_B)

    @torch.inference_mode()
    def _forward(self, *arrays: Array) -> tuple[Array, Array, Array]:
        features_BDhw, query_Bd, gain_B = (torch.from_numpy(array.copy()) for array in arrays)
        output = ExpertOutput(*self.expert(features_BDhw))
        settings = {"channel": self.config.channel, "temperature": self.config.routing.norm_temperature}
        found = report(output, query_Bd, gain_B, **settings)
        return output.logits_BChw.numpy(), found.delta.numpy(), found.scale_limit.numpy()


@serve.deployment(**_MANY)
class Cloud:
    """Backbone, routing, channel and fusion of whole batches."""

    def __init__(self, run: str, *experts: Any) -> None:
        self.segmenter = _load(run, threads=os.cpu_count() or 1)
        self.experts, self.served = experts, 0

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.002)
    async def segment(self, images: list[Array]) -> list[Array]:
        """Logits (C, h, w) of each image of a batch, all of one size."""
        features_BDhw, fine, query_Bd = await asyncio.to_thread(self._see, images)
        stats = await asyncio.gather(*(expert.read.remote(query_Bd.numpy()) for expert in self.experts))
        config, model, batch = self.segmenter.config, self.segmenter.model, len(images)
        ids_B = range(self.served, self.served + batch)
        self.served += batch
        gamma_BN = draw_gamma(ids_B, len(self.experts), config=config.channel, seed=config.seed)
        gain_BN = gamma_BN.abs().square().float()
        routing = route(query_Bd, torch.from_numpy(np.stack(stats, axis=1)), config=config.routing)
        routing = truncate(routing, in_deep_fade(gamma_BN, config.channel), config.channel.truncation)
        if routing.all_faded_B.any():
            routing = keep_strongest(routing, gain_BN.gather(1, routing.selected_BK))
        places = [((routing.transmit_BK == j) & routing.active_BK).nonzero() for j in range(len(self.experts))]
        replies = await asyncio.gather(*(
            self.experts[j].forward.remote(*(x[place[:, 0]].numpy() for x in (features_BDhw, query_Bd, gain_BN[:, j])))
            for j, place in enumerate(places)
            if len(place)
        ))  # fmt: skip
        shape = routing.transmit_BK.shape
        logits_BKChw = torch.zeros(*shape, *replies[0][0].shape[1:])
        delta_BK, limit_BK = torch.ones(shape), torch.ones(shape)
        for place, (logits, delta, limit) in zip((p for p in places if len(p)), replies, strict=True):
            at = (place[:, 0], place[:, 1])
            logits_BKChw[at], delta_BK[at], limit_BK[at] = map(torch.tensor, (logits, delta, limit))
        beta_BK = fusion_weights(delta_BK, routing.active_BK, config.routing)
        rho_B = receive_scale(limit_BK, beta_BK, routing.active_BK)
        gamma_BK = gamma_BN.gather(1, routing.transmit_BK).to(torch.complex64)
        sent_BKChw = precode(logits_BKChw, beta_BK, rho_B[:, None], gamma_BK, channel=config.channel)
        arrived = deliver(sent_BKChw, gamma_BK, beta_BK, ids_B=ids_B, config=config.channel, seed=config.seed)
        fused_BChw = receive(arrived.signal_BChw, rho_B)
        return await asyncio.to_thread(self._finish, fused_BChw, features_BDhw, fine, model)

    @torch.inference_mode()
    def _see(self, images: list[Array]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
        model = self.segmenter.model
        maps = self.segmenter.backbone.maps(to_tensor(images), fine=model.refiner is not None)
        return maps.features_BDhw, maps.fine, model.query(maps.features_BDhw)

    @torch.inference_mode()
    def _finish(self, fused_BChw: torch.Tensor, features_BDhw: torch.Tensor, fine: Any, model: Any) -> list[Array]:
        if model.shared is not None:
            fused_BChw = fused_BChw + model.shared(features_BDhw)
        refine = model.cloud.refine(fine)
        return list((fused_BChw if refine is None else refine(fused_BChw)).numpy())


@serve.deployment(**_MANY)
@serve.ingress(app)
class Front:
    """Image files in, index PNGs out."""

    def __init__(self, run: str, cloud: Any) -> None:
        self.segmenter, self.cloud = _load(run, threads=1), cloud

    @app.get("/readyz")
    async def ready(self) -> str:
        """Serve answers only once all replicas are there."""
        return "ready"

    @app.post("/segment")
    async def segment(self, request: Request) -> Response:
        """One image."""
        data = await request.body()
        rgb = await asyncio.to_thread(lambda: decode(data, max_pixels=1 << 26).rgb)
        image = self.segmenter.prepare(rgb)
        logits_Chw = torch.from_numpy(np.array(await self.cloud.segment.remote(image.padded)))
        png = await asyncio.to_thread(lambda: index_png(mask_of(logits_Chw, image), self.segmenter.card.table))
        return Response(png, media_type="image/png", headers={"Server-Timing": "all;dur=0"})


def main() -> None:
    """Serve until the process is stopped."""
    run, port = sys.argv[1], int(sys.argv[2])
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    count = Segmenter.load(find_model(run).checkpoint).config.experts.count
    experts = [Expert.options(name=f"expert_{j}").bind(run, j) for j in range(count)]
    serve.run(Front.bind(run, Cloud.bind(run, *experts)), route_prefix="/")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()


if __name__ == "__main__":
    main()
