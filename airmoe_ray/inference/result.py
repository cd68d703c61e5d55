"""What a `Segmenter` answers: the mask of one image, its segments, and the account of how they came about.

Suffixes: N clients, K routed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from airmoe_ray.config import ChannelConfig, Config, RoutingConfig
from airmoe_ray.data.base import ClassTable, UInt8Array
from airmoe_ray.inference.masks import Prepared, mask_and_scores
from airmoe_ray.inference.pictures import colour_mask, overlay
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.radio.channel import noise_power
from airmoe_ray.radio.ledger import Ledger, account
from airmoe_ray.storage.checkpoint import ModelCard


@dataclass(frozen=True)
class ImageSegment:
    """One class that is present in the image."""

    label: str
    id: int
    score: float  # mean softmax over its pixels
    area: int  # pixels


@dataclass(frozen=True)
class RoutedClient:
    """One client's part in the answer."""

    id: int
    knows: str  # in a few words, from the model's card; empty: nobody said
    js: float  # D_JS(Q || P_j) [nats]
    score: float
    probability: float
    selected: bool  # in S, before truncation
    weight: float  # beta_j, 0 where silent
    gamma: complex | None  # its channel estimate, where it transmitted


@dataclass(frozen=True)
class ChannelReport:
    """What the air did to the answer."""

    kind: str
    snr_db: float
    rho: float
    truncated: tuple[int, ...]  # routed clients in deep fade
    noise_power: float  # sigma_c^2 per complex symbol
    nmse: float  # against the noiseless sum
    channel_uses: int
    seed: int  # from which fading and noise follow


@dataclass(frozen=True, eq=False, repr=False)  # arrays neither compare to one truth value nor print well
class Segmentation:
    """The answer for one image."""

    mask: UInt8Array  # (H, W), class ids at the image's own size
    classes: tuple[str, ...]
    palette: tuple[tuple[int, int, int], ...]
    segments: tuple[ImageSegment, ...]  # the classes present, in order of their ids
    scores: dict[str, float]  # of every class: mean softmax over the pixels it won, 0 where it won none
    routing: tuple[RoutedClient, ...]  # all clients, in order of their ids
    channel: ChannelReport
    communication: Ledger
    image: UInt8Array  # (H, W, 3), upright, as it was segmented

    @property
    def answered(self) -> tuple[RoutedClient, ...]:
        """The clients that were heard, the heaviest first."""
        return tuple(sorted((c for c in self.routing if c.weight > 0), key=lambda client: -client.weight))

    def colour(self) -> Image.Image:
        """The mask in the classes' colours."""
        return Image.fromarray(colour_mask(self.mask, self._table))

    def overlay(self) -> Image.Image:
        """The image with the mask's colours over it."""
        return Image.fromarray(overlay(self.image, self.mask, self._table))

    @property
    def _table(self) -> ClassTable:
        return ClassTable(self.classes, self.palette)

    def __repr__(self) -> str:
        height, width = self.mask.shape
        largest = sorted(self.segments, key=lambda segment: -segment.area)[:3]
        told = ", ".join(f"{segment.label} {segment.area / self.mask.size:.0%}" for segment in largest)
        return f"<Segmentation {width}x{height}: {told}; clients {', '.join(str(c.id) for c in self.answered)}>"


@dataclass(frozen=True)
class ImageAccount:
    """What is known of one image's way over the air."""

    truncated: tuple[int, ...]  # routed clients in deep fade
    noise_power: float  # sigma_c^2 per complex symbol; 0 where there is no air
    ledger: Ledger


def account_of(
    config: Config,
    *,
    selected: Collection[int],
    faded_N: Sequence[bool],
    gamma: Mapping[int, complex],
    channel: ChannelConfig,
    routing: RoutingConfig,
    feature_dim: int,
    classes: int,
    grid: tuple[int, int],
) -> ImageAccount:
    """The account of an image with its own `channel` and `routing`; `gamma` has the gains of those that were heard."""
    return ImageAccount(
        truncated=tuple(sorted(j for j in selected if faded_N[j] and j not in gamma)),
        noise_power=noise_power(channel) if channel.kind == "air" else 0.0,
        ledger=account(
            config,
            feature_dim=feature_dim,
            classes=classes,
            grid=grid,
            top_k=len(gamma),
            gains_K=[abs(gain) ** 2 for gain in gamma.values()],
            snr_db=channel.snr_db,
            clients=len(faded_N),
            routing=routing,
        ),
    )


def segmentation_of(
    output: AirMoEOutput[Any],
    prepared: Prepared,
    *,
    image: UInt8Array,
    card: ModelCard,
    config: Config,
    seed: int,
) -> Segmentation:
    """The answer of a batch of one image; `config` has the routing and the channel that it went through."""
    mask, score_C, area_C = mask_and_scores(output.logits_BChw[0], prepared)
    clients = _clients(output, card)
    height, width = output.coarse_BChw.shape[2:]
    told = account_of(
        config,
        selected=[client.id for client in clients if client.selected],
        faded_N=output.round.faded_BN[0].tolist(),
        gamma={client.id: client.gamma for client in clients if client.gamma is not None},
        channel=config.channel,
        routing=config.routing,
        feature_dim=card.feature_dim,
        classes=len(card.classes),
        grid=(height, width),
    )
    return Segmentation(
        mask=mask,
        classes=card.table.names,
        palette=card.table.palette,
        segments=tuple(
            ImageSegment(card.classes[c], int(c), float(score_C[c]), int(area_C[c])) for c in np.flatnonzero(area_C)
        ),
        scores={name: float(score) for name, score in zip(card.classes, score_C, strict=True)},
        routing=clients,
        channel=ChannelReport(
            kind=config.channel.kind,
            snr_db=config.channel.snr_db,
            rho=float(output.rho_B[0]),
            truncated=told.truncated,
            noise_power=told.noise_power,
            nmse=float(output.nmse_B[0]),
            channel_uses=told.ledger.air_channel_uses,
            seed=seed,
        ),
        communication=told.ledger,
        image=image,
    )


def _clients(output: AirMoEOutput[Any], card: ModelCard) -> tuple[RoutedClient, ...]:
    routing = output.routing
    selected = set(routing.selected_BK[0].tolist())
    weight = dict(zip(routing.transmit_BK[0].tolist(), output.beta_BK[0].tolist(), strict=True))
    gamma_N = output.round.gamma_BN[0].tolist()
    clients = range(len(gamma_N))
    known = card.clients if len(card.clients) == len(gamma_N) else [""] * len(gamma_N)
    facts = zip(
        clients, known, *(x[0].tolist() for x in (routing.js_BN, routing.score_BN, routing.prob_BN)), strict=True
    )
    return tuple(
        RoutedClient(
            id=j,
            knows=words,
            js=js,
            score=score,
            probability=probability,
            selected=j in selected,
            weight=weight.get(j, 0.0),
            gamma=gamma_N[j] if weight.get(j, 0.0) > 0 else None,
        )
        for j, words, js, score, probability in facts
    )
