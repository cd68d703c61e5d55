"""A client's expert, Eq. (17)-(19), and the economy of calling it: routed samples only."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from airmoe_ray.config import ExpertsConfig
from airmoe_ray.model.experts import ConvNormRelu, Expert, dilations_for
from airmoe_ray.model.moe import AirMoE


def make_expert(*, bound: float = 100.0, seed: int = 0, width: int = 16) -> Expert:
    return Expert(
        ExpertsConfig(hidden=16, width=width),
        feature_dim=6,
        classes=3,
        dim=8,
        bound=bound,
        dilations=(1, 2, 3),
        generator=torch.Generator().manual_seed(seed),
    ).double()


@pytest.mark.parametrize("grid", [(1, 1), (3, 4), (7, 2)])
def test_logits_keep_the_grid_and_psi_has_the_statistics_dimension(
    grid: tuple[int, int], make_features: Callable[..., Tensor]
) -> None:
    output = make_expert()(make_features(5, grid=grid))
    assert output.logits_BChw.shape == (5, 3, *grid)
    assert output.psi_Bd.shape == (5, 8)


def test_psi_is_a_linear_map_of_the_mean_hidden_map_clipped_to_the_bound(make_features: Callable[..., Tensor]) -> None:
    features = make_features(20)
    expert = make_expert()
    free = (expert.encoder(features).mean(dim=(2, 3)) @ expert.psi.weight.T).detach()
    bound = float(free.norm(dim=-1).median())
    psi, length = make_expert(bound=bound)(features).psi_Bd, free.norm(dim=-1)
    assert psi.norm(dim=-1).max() <= bound * (1 + 1e-12)
    torch.testing.assert_close(psi[length <= bound], free[length <= bound])
    torch.testing.assert_close(psi, free * (bound / length).clamp_max(1)[:, None])


def test_a_sample_alone_gives_what_it_gives_in_a_batch(make_features: Callable[..., Tensor]) -> None:
    expert, features = make_expert().train(), make_features(5)
    together = expert(features)
    for i in range(5):
        alone = expert(features[i : i + 1])
        torch.testing.assert_close(alone.logits_BChw[0], together.logits_BChw[i], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(alone.psi_Bd[0], together.psi_Bd[i], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("grid", "chosen", "expected"),
    [
        (16, None, (2, 4, 8)),
        (36, None, (2, 4, 8)),
        (37, None, (6, 12, 18)),
        (64, None, (6, 12, 18)),
        (64, (1, 2, 3), (1, 2, 3)),
    ],
)
def test_dilations_follow_the_grid_unless_they_are_given(
    grid: int, chosen: tuple[int, int, int] | None, expected: tuple[int, int, int]
) -> None:
    assert dilations_for(ExpertsConfig(dilations=chosen), grid) == expected


def test_a_dilated_branch_looks_exactly_its_dilation_away() -> None:
    branch = ConvNormRelu(1, 8, kernel=3, dilation=3).double()
    impulse = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    impulse[..., 4, 4] = 1
    touched = (branch.conv(impulse)[0] != 0).any(dim=0).nonzero().tolist()
    assert touched == [[row, column] for row in (1, 4, 7) for column in (1, 4, 7)]


def test_every_branch_of_the_encoder_matters(make_features: Callable[..., Tensor]) -> None:
    expert = make_expert()
    expert(make_features(4)).logits_BChw.square().sum().backward()
    for branch in (expert.encoder.pointwise, *expert.encoder.dilated, expert.encoder.pooled):
        assert branch.conv.weight.grad is not None
        assert branch.conv.weight.grad.abs().max() > 0


def test_experts_of_different_streams_differ_and_of_the_same_stream_are_equal() -> None:
    one, same, other = (torch.cat([p.flatten() for p in make_expert(seed=s).parameters()]) for s in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("truncation", ["drop", "substitute"])
def test_experts_see_exactly_the_routed_and_untruncated_samples(
    truncation: str, make_model: Callable[..., AirMoE], make_features: Callable[..., Tensor]
) -> None:
    model = make_model(channel={"gamma_th": 0.9, "truncation": truncation})
    seen: Counter[int] = Counter()
    calls: Counter[int] = Counter()
    for j, expert in enumerate(model.clients.experts):

        def count(_m: object, inputs: tuple[Tensor], _o: object, j: int = j) -> None:
            seen[j] += len(inputs[0])
            calls[j] += 1

        expert.register_forward_hook(count)
    routing = model(make_features(12), range(12)).routing
    assert (~routing.active_BK).sum() > 0
    assert sum(seen.values()) == routing.active_BK.sum() < 12 * 2
    assert seen == Counter(routing.transmit_BK[routing.active_BK].tolist())
    assert max(calls.values()) == 1


def test_an_expert_without_a_sample_is_not_called_and_gets_no_gradient(
    make_model: Callable[..., AirMoE], make_features: Callable[..., Tensor]
) -> None:
    model = make_model(channel={"kind": "ideal"})
    called = []
    for j, expert in enumerate(model.clients.experts):
        expert.register_forward_hook(lambda *_, j=j: called.append(j))
    output = model(make_features(1), [0])
    output.logits_BChw.square().sum().backward()
    assert sorted(called) == sorted(output.routing.selected_BK[0].tolist())
    for j, expert in enumerate(model.clients.experts):
        assert all((p.grad is not None) == (j in called) for p in expert.parameters())
