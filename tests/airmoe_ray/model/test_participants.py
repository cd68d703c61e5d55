"""Whose answer it is: one participant alone, or all but one (`only`, `without`)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe_ray.errors import UserError
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.model.routing import NobodyPresentError, Participants, route

Model, Features = Callable[..., AirMoE], Callable[..., Tensor]
EXACT = {"rtol": 1e-12, "atol": 1e-12}
CHANNELS = [{"kind": "ideal"}, {"kind": "air", "gamma_th": 50.0}, {"kind": "air", "truncation": "substitute"}]
WITH_HEAD: dict[str, Any] = {"experts": {"shared": True}}


@pytest.mark.parametrize("client", range(4))
def test_one_client_alone_is_its_expert_without_the_clouds_head(
    client: int, make_model: Model, make_features: Features
) -> None:
    model, features = make_model(**WITH_HEAD, channel={"kind": "ideal"}), make_features(5)
    output = model(features, range(5), participants=Participants(only=client))
    torch.testing.assert_close(output.logits_BChw, model.clients.experts[client](features).logits_BChw, **EXACT)
    assert output.routing.selected_BK.tolist() == [[client]] * 5
    assert output.beta_BK.tolist() == [[1.0]] * 5


@pytest.mark.parametrize("channel", CHANNELS, ids=["ideal", "all faded", "substitute"])
def test_one_client_alone_transmits_also_in_deep_fade_and_nobody_steps_in(
    channel: dict[str, Any], make_model: Model, make_features: Features
) -> None:
    output = make_model(channel=channel)(make_features(6), range(6), participants=Participants(only=2))
    assert output.routing.transmit_BK.tolist() == [[2]] * 6
    assert output.beta_BK.tolist() == [[1.0]] * 6


def test_the_cloud_alone_is_its_head_and_nobody_transmits(make_model: Model, make_features: Features) -> None:
    model, features = make_model(**WITH_HEAD), make_features(5)
    assert model.shared is not None
    output = model(features, range(5), participants=Participants(only="cloud"))
    assert torch.equal(output.logits_BChw, model.shared(features))
    assert output.beta_BK.shape == output.routing.transmit_BK.shape == (5, 0)
    assert not output.nmse_B.any()
    assert not output.routing.all_faded_B.any()
    torch.testing.assert_close(output.routing.prob_BN, model(features, range(5)).routing.prob_BN)


def test_without_the_cloud_its_head_is_missing_from_the_sum(make_model: Model, make_features: Features) -> None:
    model, features = make_model(**WITH_HEAD), make_features(5)
    assert model.shared is not None
    both = model(features, range(5))
    without = model(features, range(5), participants=Participants(without="cloud"))
    torch.testing.assert_close(without.logits_BChw, both.logits_BChw - model.shared(features), **EXACT)


@pytest.mark.parametrize("truncation", ["drop", "substitute"])
def test_without_a_client_the_best_of_the_others_are_routed(
    truncation: str, make_model: Model, make_features: Features
) -> None:
    model, features = make_model(channel={"truncation": truncation, "gamma_th": 0.3}), make_features(6)
    order = model(features, range(6)).routing.order_BN.tolist()
    for left_out in range(4):
        output = model(features, range(6), participants=Participants(without=left_out))
        assert output.routing.selected_BK.tolist() == [[j for j in row if j != left_out][:2] for row in order]
        assert not (output.routing.transmit_BK == left_out).any()
        assert not output.routing.prob_BN[:, left_out].any()


def test_leaving_out_who_was_not_routed_changes_nothing(make_model: Model, make_features: Features) -> None:
    model, features = make_model(), make_features(1)
    everybody = model(features, [7])
    idle = int(everybody.routing.order_BN[0, -1])
    assert torch.equal(model(features, [7], participants=Participants(without=idle)).logits_BChw, everybody.logits_BChw)


def test_the_refiner_stays_at_work_whoever_answers(make_model: Model, make_features: Features) -> None:
    config = make_model(**WITH_HEAD, channel={"kind": "ideal"}).config
    experts = config.experts.model_copy(update={"refiner": 16})
    model = AirMoE(
        config.model_copy(update={"experts": experts}), feature_dim=6, classes=3, dilations=(1, 2, 3), fine_dims=[5]
    ).double()
    assert model.refiner is not None
    torch.nn.init.normal_(model.refiner.correct.weight)
    features, fine = make_features(2), (torch.rand(2, 5, 12, 16, dtype=torch.float64),)
    for one in (1, "cloud"):
        output = model.eval()(features, range(2), fine=fine, participants=Participants(only=one))
        assert torch.equal(output.logits_BChw, model.refiner(output.coarse_BChw, fine))


@pytest.mark.parametrize(
    ("choice", "shared", "line"),
    [
        ({"only": 4}, True, "only: 4: there are clients 0 to 3, and cloud"),
        ({"without": -1}, False, "without: -1: there are clients 0 to 3"),
        ({"only": "cloud"}, False, "only: cloud: this model has no head at the cloud"),
        ({"without": "cloud"}, False, "without: cloud: this model has no head at the cloud"),
        ({"only": 1, "without": 2}, True, "only and without: both are given"),
    ],
)
def test_a_choice_that_nobody_can_answer_is_refused_in_one_line(choice: Any, shared: bool, line: str) -> None:
    with pytest.raises(UserError, match=f"^{line}") as refused:
        Participants(**choice).check(4, shared=shared)
    assert "\n" not in str(refused.value)


def test_the_only_client_cannot_be_left_out() -> None:
    with pytest.raises(UserError, match="nobody would be left"):
        Participants(without=0).check(1, shared=False)


def test_routing_among_nobody_says_so(make_model: Model) -> None:
    uniform = torch.full((2, 4, 8), 1 / 8)
    with pytest.raises(NobodyPresentError):
        route(uniform[:, 0], uniform, config=make_model().config.routing, present_N=torch.zeros(4, dtype=torch.bool))
