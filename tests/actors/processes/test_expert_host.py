"""A host of many clients is as many hosts of one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.errors import InvalidOutputError
from actors.processes.expert_host import ExpertHost
from actors.rounds.messages import Forward, HostSpec, Read, Renew, Transmit
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.radio.channel import draw_gamma, in_deep_fade
from airmoe_ray.storage.checkpoint import ModelCard, expert_file, read_file, save_checkpoint

CLIENTS = 12
CARD = ModelCard(["a", "b", "c"], [[0, 0, 0]] * 3, 6, [1, 2, 3], "none", "none")


@pytest.fixture
def make_host(make_model: Callable[..., AirMoE], tmp_path: Path) -> Callable[..., ExpertHost]:
    """Some of twelve clients, whose libraries differ in size, in one host."""
    model = make_model(experts={"count": CLIENTS}, frl={"prototypes": [2 + j % 3 for j in range(CLIENTS)]}).float()
    save_checkpoint(tmp_path / "checkpoint", model, CARD)

    def make(*clients: int) -> ExpertHost:
        files = [read_file(expert_file(tmp_path / "checkpoint", client)) for client in clients]
        return ExpertHost(HostSpec(clients, model.config, CARD), files)

    return make


def test_clients_that_share_a_host_send_what_they_would_send_alone(
    make_host: Callable[..., ExpertHost], make_features: Callable[..., Tensor]
) -> None:
    shared = make_host(*range(CLIENTS))
    query = np.random.default_rng(0).dirichlet(np.ones(8), 3).astype(np.float32)
    features, samples = make_features(3).float().numpy(), np.arange(3)
    read = Read("r", (0, 1, 2), query, shared.config.channel)
    together = shared.read(read)
    gamma = draw_gamma(range(3), CLIENTS, config=shared.config.channel, seed=shared.config.seed)
    assert np.array_equal(together.faded_Bn, in_deep_fade(gamma, shared.config.channel).numpy())
    for client in range(CLIENTS):
        alone, own = make_host(client), np.full(3, client)
        said = alone.read(read)
        np.testing.assert_allclose(together.stat_Bnd[:, [client]], said.stat_Bnd, rtol=1e-6)  # rows of padded libraries
        assert np.array_equal(together.faded_Bn[:, [client]], said.faded_Bn)
        forward, transmit = Forward("r", query, samples, own), Transmit("r", samples, own, *weights())
        left, right = (host.forward(forward, features) for host in (shared, alone))
        assert np.array_equal(left.delta_P, right.delta_P)
        assert np.array_equal(left.scale_limit_P, right.scale_limit_P)
        assert np.array_equal(shared.transmit(transmit), alone.transmit(transmit))


def test_every_exchange_counts_as_work_however_it_is_asked_for(
    make_host: Callable[..., ExpertHost], make_features: Callable[..., Tensor]
) -> None:
    host, query, features = make_host(0), np.full((3, 8), 0.125, np.float32), make_features(3).float().numpy()
    samples, own = np.arange(3), np.zeros(3, int)
    host.read(Read("r", (0, 1, 2), query, host.config.channel))
    asked: list[Callable[[], object]] = [
        lambda: host.exchange(Read("s", (0, 1, 2), query, host.config.channel).packed),
        lambda: host.compute(Forward("r", query, samples, own).packed, features),
        lambda: host.emit(Transmit("r", samples, own, *weights()).packed),
        lambda: host.remember(Renew("r", samples, own, (1, 2, 3)).packed),
    ]
    for ask in asked:
        before = host.busy.seconds
        ask()
        assert host.busy.seconds > before


def weights() -> tuple[np.ndarray, np.ndarray]:
    return np.full(3, 0.5, np.float32), np.ones(3, np.float32)


def test_a_probe_takes_experts_in_turn_and_does_not_let_go_of_a_broken_one(
    make_host: Callable[..., ExpertHost], make_features: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.processes.expert_host._PROBED", 5)
    host = make_host(*range(CLIENTS))
    monkeypatch.setattr(host, "state", lambda: None)  # which asks Ray where it is
    asked: list[int] = []
    for index, expert in enumerate(host.clients.experts):
        expert.register_forward_hook(lambda *_, index=index: asked.append(index))
    for _ in range(3):
        host.probe()
    assert set(asked) == set(range(CLIENTS))
    bias = host.clients.experts[9].decoder.bias
    kept = bias.detach().clone()
    bias.data.fill_(torch.nan)
    query = np.full((1, 8), 0.125, np.float32)
    host.read(Read("r", (0,), query, host.config.channel))
    with pytest.raises(InvalidOutputError, match="the output of expert 9 is not finite"):
        host.forward(Forward("r", query, np.array([0, 0]), np.array([2, 9])), make_features(1).float().numpy())
    for _ in range(3):
        with pytest.raises(InvalidOutputError, match="expert 9"):
            host.probe()
    bias.data.copy_(kept)
    asked.clear()
    host.probe()
    assert 9 in asked
