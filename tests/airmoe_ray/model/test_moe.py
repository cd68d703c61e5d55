"""The algorithm as a whole: replay, independence of batching, symmetry under renaming clients, constraints."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import airmoe_ray.model.client
import airmoe_ray.model.local_clients
from airmoe_ray.config import Config
from airmoe_ray.errors import ConfigError
from airmoe_ray.model.local_clients import LocalClients
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.training.constraints import check_constraints, sent_energy
from airmoe_ray.training.losses import objective

Model, Features = Callable[..., AirMoE], Callable[..., Tensor]
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
FADING = {"gamma_th": 0.3, "snr_db": 10}


def per_input(output: AirMoEOutput[Any]) -> dict[str, Tensor]:
    """Everything an output says about each input."""
    routing = output.routing
    return {
        "logits": output.logits_BChw,
        "query": output.query_dist_Bd,
        "delta": output.delta_BK,
        "beta": output.beta_BK,
        "rho": output.rho_B,
        "nmse": output.nmse_B,
        "js": routing.js_BN,
        "prob": routing.prob_BN,
        "selected": routing.selected_BK,
        "transmit": routing.transmit_BK,
        "active": routing.active_BK,
        "all_faded": routing.all_faded_B,
    }


@pytest.mark.parametrize("kind", ["air", "digital", "ideal"])
def test_the_same_ids_replay_bit_for_bit_and_other_ids_do_not(
    kind: str, make_model: Model, make_features: Features
) -> None:
    model, features = make_model(channel={**FADING, "kind": kind}), make_features(5)
    first, again, other = (per_input(model(features, ids)) for ids in (range(5), range(5), range(5, 10)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(first["logits"], other["logits"]) == (kind == "ideal")


@settings(deadline=None, max_examples=10)
@given(cut=st.integers(1, 6), ids=st.lists(st.integers(0, 2**64 - 1), min_size=7, max_size=7))
@pytest.mark.parametrize("truncation", ["drop", "substitute"])
def test_splitting_a_batch_differently_changes_nothing(
    truncation: str, cut: int, ids: list[int], make_model: Model, make_features: Features
) -> None:
    model, features = make_model(channel={**FADING, "truncation": truncation}), make_features(7)
    whole = per_input(model(features, ids))
    parts = [per_input(model(features[part], ids[part])) for part in (slice(cut), slice(cut, None))]
    for name, value in whole.items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), value, **CLOSE)


@pytest.mark.parametrize("kind", ["air", "digital"])
def test_renaming_the_clients_renames_everything_and_changes_no_answer(
    kind: str, make_model: Model, make_features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, features, names = make_model(channel={**FADING, "kind": kind}), make_features(6), [2, 0, 3, 1]
    before = model(features, range(6))
    draw = airmoe_ray.model.local_clients.draw_gamma
    model.clients.experts = torch.nn.ModuleList(model.clients.experts[j] for j in names)
    with torch.no_grad():
        model.clients.frl.prototypes_NMd.copy_(model.clients.frl.prototypes_NMd[names])
    monkeypatch.setattr(airmoe_ray.model.local_clients, "draw_gamma", lambda *a, **k: draw(*a, **k)[:, names])
    after = model(features, range(6))
    torch.testing.assert_close(after.logits_BChw, before.logits_BChw, **CLOSE)
    torch.testing.assert_close(after.routing.prob_BN, before.routing.prob_BN[:, names], **CLOSE)
    assert torch.equal(torch.tensor(names)[after.routing.transmit_BK], before.routing.transmit_BK)
    torch.testing.assert_close(after.beta_BK, before.beta_BK, **CLOSE)
    assert (~after.routing.active_BK).any()


def test_the_answer_is_the_algorithm_done_by_hand_for_one_input(make_model: Model, make_features: Features) -> None:
    model, features = make_model(channel={"fading": "none", "snr_db": 120}), make_features(1)
    output = model(features, [9])
    q = output.query_dist_Bd[0].detach().numpy()
    answer, total = np.zeros((3, 3, 4)), 0.0
    for j in output.routing.selected_BK[0].tolist():
        logits, psi = (t[0].detach().numpy() for t in model.clients.experts[j](features))
        r = np.exp(psi) / np.exp(psi).sum()
        middle = (q + r) / 2
        delta = 0.5 * (q * np.log(q / middle)).sum() + 0.5 * (r * np.log(r / middle)).sum()
        answer, total = answer + logits / (0.05 + delta), total + 1 / (0.05 + delta)
    np.testing.assert_allclose(output.logits_BChw[0].detach(), answer / total, atol=1e-5 * np.abs(answer / total).max())


def test_where_everybody_fades_the_strongest_of_the_set_answers_alone(
    make_model: Model, make_features: Features
) -> None:
    model = make_model(channel={"gamma_th": 100, "snr_db": 20})
    output = model(make_features(5), range(5))
    gains = output.round.gains(output.routing.selected_BK)
    assert output.routing.all_faded_B.all()
    assert torch.equal(output.beta_BK, torch.nn.functional.one_hot(gains.argmax(dim=1), 2).to(output.beta_BK))
    assert output.logits_BChw.isfinite().all()


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(1, 4),
    snr_db=st.floats(-20, 60),
    fading=st.sampled_from(["rayleigh", "rician", "none"]),
    kind=st.sampled_from(["air", "ideal", "digital"]),
    truncation=st.sampled_from(["drop", "substitute"]),
    prototypes=st.sampled_from([1, [1, 2, 3, 4]]),
)
def test_constraints_hold_for_any_model(
    make_config: Callable[..., Config], make_model: Model, make_features: Features, **draw: Any
) -> None:
    config = make_config(
        seed=draw["seed"],
        routing={"top_k": draw["top_k"], "budget_bits": 4 * (8 * 32 + 1)},
        channel={**{name: draw[name] for name in ("snr_db", "fading", "kind", "truncation")}, "gamma_th": 0.5},
        frl={"prototypes": draw["prototypes"]},
    )
    output = make_model(config)(make_features(4, seed=draw["seed"]), range(4))
    check_constraints(output, config, tolerance=1e-9)
    if draw["kind"] == "air":
        torch.testing.assert_close(sent_energy(output).max(dim=1).values, torch.ones(4, dtype=torch.float64))


TAMPERED: dict[str, Callable[[AirMoEOutput[Any]], AirMoEOutput[Any]]] = {
    r"\(6a\)": lambda o: replace(o, routing=replace(o.routing, selected_BK=o.routing.order_BN[:, -2:])),
    r"\(6b\)": lambda o: replace(
        o,
        routing=replace(
            o.routing, selected_BK=o.routing.selected_BK[:, [0, 0]], order_BN=o.routing.selected_BK[:, [0, 0]]
        ),
    ),
    r"\(6e\)": lambda o: replace(o, rho_B=1.01 * o.rho_B),
    r"\(6f\) beta_j >= 0": lambda o: replace(o, beta_BK=torch.stack([-o.beta_BK[:, 0], o.beta_BK[:, 1]], dim=1)),
    r"\(6f\) sum beta_j = 1": lambda o: replace(o, beta_BK=0.99 * o.beta_BK),
}


@pytest.mark.parametrize("which", TAMPERED)
def test_the_check_names_the_constraint_that_a_tampered_output_violates(
    which: str, make_config: Callable[..., Config], make_model: Model, make_features: Features
) -> None:
    # without the air, wrong weights cannot show up as misalignment (e) first
    config = make_config(channel={"kind": "ideal" if "beta_j" in which else "air"})
    output = make_model(config)(make_features(4), range(4))
    check_constraints(output, config)
    with pytest.raises(AssertionError, match=which):
        check_constraints(TAMPERED[which](output), config)


def test_the_check_looks_at_what_clients_really_sent(
    make_config: Callable[..., Config], make_model: Model, make_features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = airmoe_ray.model.client.transmit_coefficient
    monkeypatch.setattr(airmoe_ray.model.client, "transmit_coefficient", lambda *a: 1.5 * honest(*a))
    config = make_config()
    output = make_model(config)(make_features(4), range(4))
    with pytest.raises(AssertionError, match=r"\(6d\)"):
        check_constraints(output, config)


def test_the_check_refuses_a_routing_uplink_over_the_budget(
    make_config: Callable[..., Config], make_model: Model, make_features: Features
) -> None:
    config = make_config(routing={"budget_bits": 4 * (8 * 32 + 1) - 1})
    with pytest.raises(ConfigError, match="C_route = 1028"):
        check_constraints(make_model(config)(make_features(2), range(2)), config)


def test_the_load_balance_term_alone_reaches_the_query_and_every_library(
    make_config: Callable[..., Config], make_model: Model, make_features: Features
) -> None:
    config = make_config(
        routing={"fusion": "equal"}, train={"lambda_lb": 0.1, "lambda_align": 0, "lambda_frl": 0, "loss_stride": 1}
    )
    model = make_model(config)
    labels = torch.zeros(3, 3, 4, dtype=torch.uint8)
    objective(model(make_features(3), range(3)), labels, model.clients.frl, config=config).total.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.query.parameters())
    assert (model.clients.frl.prototypes_NMd.grad.abs().amax(dim=(1, 2)) > 0).all()


class OneAbsent(LocalClients):
    """Client 2 does not answer, and is not in the roster either."""

    def begin(self, ids_B: Any, channel: Any) -> Any:
        round_ = super().begin(ids_B, channel)
        read = round_.read
        present_N = torch.arange(4) != 2
        round_.read = lambda query_dist_Bd: read(query_dist_Bd)._replace(present_N=present_N)
        return round_


@pytest.mark.parametrize("truncation", ["drop", "substitute"])
def test_who_is_absent_steps_in_for_nobody(make_model: Model, make_features: Features, truncation: str) -> None:
    channel = {"truncation": truncation, "gamma_th": 0.9}  # most of them fade, so substitutes are wanted
    model = make_model(channel=channel, routing={"top_k": 2})
    model.clients.__class__ = OneAbsent
    output = model(make_features(40), range(40))
    assert (~output.routing.active_BK).any()
    assert 2 not in output.routing.transmit_BK


def test_the_channel_given_to_a_call_takes_the_place_of_the_configured_one(
    make_model: Model, make_features: Features
) -> None:
    model, features = make_model(channel=FADING), make_features(3)
    ideal = model.config.channel.model_copy(update={"kind": "ideal"})
    assert (model(features, range(3), channel=ideal).nmse_B == 0).all()
    assert (model(features, range(3)).nmse_B > 0).all()
    one = model.config.routing.model_copy(update={"top_k": 1})
    assert model(features, range(3), routing_config=one).beta_BK.shape == (3, 1)
