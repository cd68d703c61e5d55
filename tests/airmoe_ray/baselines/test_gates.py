"""Gates at the cloud: what they choose, how they weigh, and that they learn."""

import numpy as np
import pytest
import torch

from airmoe_ray.baselines.linear_moe import LinearGate
from airmoe_ray.baselines.method import gated
from airmoe_ray.baselines.nonlinear_moe import PerturbedCosineGate
from airmoe_ray.baselines.oracle import DomainGate
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.training.trainer import Batch, Trainer
from tests.airmoe_ray.training.support import random_labels

GATES = (LinearGate, PerturbedCosineGate)


def with_gate(make_config, gate, **changes) -> Config:
    return gated(make_config(), gate, head=False, changes=changes)


def scores(model, features):
    """The gate's scores by its own formula, in numpy."""
    x = features.mean(dim=(2, 3)).numpy()
    x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
    gate = model.gate
    if isinstance(gate, LinearGate):
        return x @ gate.linear.weight.detach().numpy().T + gate.linear.bias.detach().numpy()
    e = gate.direction_ND.detach().numpy()
    lengths = (np.linalg.norm(x, axis=1)[:, None] + gate.t1) * (np.linalg.norm(e, axis=1) + gate.t2)
    return float(gate.scale.detach()) * (x @ e.T) / lengths + gate.bias_N.detach().numpy()


@pytest.mark.parametrize("gate", GATES)
def test_the_k_best_scores_are_routed_and_weighed_by_their_softmax(gate, make_config, make_model, make_features):
    model, features = make_model(with_gate(make_config, gate, **{"channel.kind": "ideal"})), make_features(5)
    output = model(features, range(5))
    expected = scores(model, features)
    best = np.argsort(-expected, axis=1)[:, :2]
    assert output.routing.selected_BK.tolist() == best.tolist()
    odds = np.exp(np.take_along_axis(expected, best, axis=1))
    np.testing.assert_allclose(output.beta_BK.detach(), odds / odds.sum(axis=1, keepdims=True), rtol=1e-9)


@pytest.mark.parametrize("gate", GATES)
def test_a_faded_client_leaves_the_softmax_to_the_others(gate, make_config, make_model, make_features):
    config = with_gate(make_config, gate, **{"channel.gamma_th": 0.7})
    output = make_model(config)(make_features(40), range(40))
    silent = ~output.routing.active_BK
    assert silent.any()
    assert not output.beta_BK[silent].any()
    torch.testing.assert_close(output.beta_BK.sum(dim=-1), torch.ones(40, dtype=torch.float64))


@pytest.mark.parametrize("gate", GATES)
def test_every_parameter_of_a_gate_moves_in_a_step(gate, make_config, make_model, make_features):
    config = with_gate(make_config, gate)
    model = make_model(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = Trainer(model, config, total_steps=10)
    trainer.step(Batch(make_features(6), random_labels(0, batch=6), list(range(6))))
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {f"gate.{name}" for name, _ in model.gate.named_parameters()} <= moved


def test_an_oracle_gives_each_domain_clients_of_its_own(make_config, make_model, make_features):
    model = make_model(with_gate(make_config, DomainGate, **{"channel.kind": "ideal"}))
    output = model(make_features(4), range(4), domains_B=torch.tensor([0, 1, 0, 1]))
    assert output.routing.selected_BK.tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
    with pytest.raises(UserError, match="needs the domain of every image"):
        model(make_features(1), [0])


def test_weights_of_a_gate_need_one(make_config):
    with pytest.raises(ValueError, match=r"routing\.fusion = gate needs a gate, routing\.rule is js"):
        make_config(routing={"fusion": "gate"})
