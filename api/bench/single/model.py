"""The model in one process: its speed against plain code, how it grows with N, and what its channel takes.

Suffixes: B inputs, N clients, K routed, d statistic, D features, C classes, h w grid.
"""

from pathlib import Path

import torch

from airmoe_ray.config import Config
from airmoe_ray.config_file import load_config
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.model.routing import route
from airmoe_ray.radio.channel import deliver, draw_gamma, noise_power
from api.bench.figures import Figure, Note, by_turns, median_ms, rate, ratio
from api.bench.single.plain import plain_logits

_BATCH, _DIM, _CLASSES, _GRID = 8, 320, 12, (24, 32)  # the quickstart's, at 192 x 256
_MANY, _FEW = 1000, 10


def model_figures(
    run: str | Path, folder: Path, *, rounds: int, seconds: float, note: Note, many: int = _MANY
) -> dict[str, Figure]:
    """All figures of this file, of the quickstart's sizes with weights at random."""
    config = load_config("quickstart", [])
    note("inprocess_speed: query to fused logits, against a plain reading of the equations")
    figures = {"inprocess_speed": inprocess_speed(config, rounds=rounds, seconds=seconds)}
    note(f"n_scaling: read and route of {many} clients against {_FEW}")
    figures["n_scaling"] = n_scaling(many, rounds=rounds, seconds=seconds)
    note("channel_throughput: fading, superposition and noise, against the sum alone")
    figures["channel_throughput"] = channel_throughput(config, rounds=rounds, seconds=seconds)
    return figures


def inprocess_speed(config: Config, *, rounds: int, seconds: float) -> Figure:
    """Images per second of ours over those of the plain code."""
    model = _untrained(config)
    features_BDhw = torch.randn(_BATCH, _DIM, *_GRID, generator=torch.Generator().manual_seed(0))
    gamma_BN = draw_gamma(range(_BATCH), config.experts.count, config=config.channel, seed=config.seed)

    @torch.inference_mode()
    def ours() -> int:
        model(features_BDhw, range(_BATCH))
        return _BATCH

    @torch.inference_mode()
    def plain() -> int:
        plain_logits(model, features_BDhw, gamma_BN)
        return _BATCH

    pairs = by_turns(lambda: rate(ours, seconds), lambda: rate(plain, seconds), rounds)
    return ratio(pairs, target=1.0, better="higher", batch=_BATCH)


def n_scaling(many: int, *, rounds: int, seconds: float) -> Figure:
    """Time of reads, divergences and TopK with many clients over that with a few; 100 would be in proportion."""

    def reading(count: int) -> float:
        model, query_Bd = (
            models[count],
            torch.full((1, models[count].config.frl.dim), 1.0 / models[count].config.frl.dim),
        )

        @torch.inference_mode()
        def ask() -> None:
            stat_BNd = model.clients.begin([0], model.config.channel).read(query_Bd).stat_BNd
            route(query_Bd, stat_BNd, config=model.config.routing)

        return median_ms(ask, seconds)

    models = {
        n: _untrained(load_config("quickstart", [f"experts.count={n}", "experts.hidden=16"])) for n in (_FEW, many)
    }
    pairs = by_turns(lambda: reading(many), lambda: reading(_FEW), rounds)
    return ratio(pairs, target=many / _FEW, better="lower", clients=[many, _FEW])


def channel_throughput(config: Config, *, rounds: int, seconds: float) -> Figure:
    """Symbols per second through the channel over those of a sum with torch's own noise."""
    channel, k = config.channel, config.routing.top_k
    sent_BKChw = torch.randn(_BATCH, k, _CLASSES, *_GRID, dtype=torch.complex64)
    gamma_BK = draw_gamma(range(_BATCH), k, config=channel, seed=0).to(torch.complex64)
    beta_BK, symbols = torch.full((_BATCH, k), 1 / k), sent_BKChw[:, 0].numel()

    def ours() -> int:
        deliver(sent_BKChw, gamma_BK, beta_BK, ids_B=range(_BATCH), config=channel, seed=0)
        return symbols

    def plain() -> int:
        total = (sent_BKChw * gamma_BK[..., None, None, None]).sum(dim=1)
        total += torch.randn_like(total) * noise_power(channel) ** 0.5
        return symbols

    pairs = by_turns(lambda: rate(ours, seconds), lambda: rate(plain, seconds), rounds)
    fastest = max(pair[0] for pair in pairs)
    return ratio(pairs, target=0.3, better="higher", symbols_per_s=round(fastest))


def _untrained(config: Config) -> AirMoE:
    torch.manual_seed(0)
    return AirMoE(config, feature_dim=_DIM, classes=_CLASSES, dilations=(1, 2, 3)).eval()
