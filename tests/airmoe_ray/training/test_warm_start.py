"""Libraries filled from each client's own history."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from airmoe_ray.config import Config
from airmoe_ray.config_file import load_config
from airmoe_ray.inference.validate import validate
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.model.statistics import norm
from airmoe_ray.runtime.progress import Silent
from airmoe_ray.training.losses import solo_objective
from airmoe_ray.training.run import open_run
from airmoe_ray.training.warm_start import client_data, k_means, pooled_features, warm_start

Configs, Model = Callable[..., Config], Callable[..., AirMoE]


def normal(count: int) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(0))


class Points:
    """A source of feature maps of one cell, with a label for each."""

    def __init__(self, pooled: Tensor) -> None:
        self.grids = [(1, 1)]
        self.maps = pooled.numpy().astype(np.float32)[..., None, None]
        self.labels = (self.maps[:, :1, 0, 0] > 0).astype(np.uint8)
        self.shape_of = np.zeros(len(self.maps), dtype=np.int64)

    def plain(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.maps[index], self.labels[index][None].repeat(8, 0).repeat(8, 1)

    def all(self) -> Tensor:
        return torch.from_numpy(self.maps).double()


def clouds(seed: int, groups: int = 3, each: int = 12, apart: float = 20.0) -> Tensor:
    """Points in separated groups."""
    rng = np.random.default_rng(seed)
    centres = apart * rng.permutation(np.eye(5))[:groups]
    return torch.from_numpy((centres[:, None] + rng.normal(size=(groups, each, 5))).reshape(-1, 5))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 6))
def test_every_centre_is_the_mean_of_the_points_nearest_to_it(seed: int, count: int) -> None:
    points = clouds(seed)
    centres = k_means(points, count, rng=np.random.default_rng(seed), rounds=100)
    nearest = ((points[:, None] - centres[None]) ** 2).sum(dim=-1).argmin(dim=1)
    for k in nearest.unique().tolist():
        torch.testing.assert_close(centres[k], points[nearest == k].mean(dim=0))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_separated_groups_are_found(seed: int) -> None:
    points = clouds(seed, apart=1e4)  # so far that the start takes one point of each group
    centres = k_means(points, 3, rng=np.random.default_rng(seed))
    means = points.view(3, 12, 5).mean(dim=1)
    assert ((means[:, None] - centres[None]).norm(dim=-1) < 1e-6).sum(dim=1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("distinct", [1, 2])
def test_more_clusters_than_points_repeats_points(distinct: int) -> None:
    points = clouds(0)[[0, 20][:distinct]]
    centres = k_means(points, 5, rng=np.random.default_rng(0))
    assert centres.shape == (5, 5)
    assert (torch.cdist(centres, points).min(dim=1).values < 1e-12).all()
    assert (torch.cdist(points, centres).min(dim=1).values < 1e-12).all()


def test_the_same_stream_gives_the_same_centres() -> None:
    points = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    one, same, other = (k_means(points, 6, rng=np.random.default_rng(s)) for s in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_client_whose_history_is_one_input_answers_that_input_with_the_query_itself(
    temperature: float, make_config: Configs, make_model: Model
) -> None:
    config = make_config(routing={"norm_temperature": temperature}, frl={"prototypes": [1, 3, 2, 2]})
    model, source = make_model(config), Points(3 * normal(4))
    warm_start(model, source, [np.array([j]) for j in (2, 0, 3, 1)], config)
    query = model.query(source.all())
    stat = norm(model.clients.frl.read(query).value_BNd, temperature)
    for j, own in enumerate((2, 0, 3, 1)):
        torch.testing.assert_close(stat[own, j], query[own], rtol=1e-8, atol=1e-10)
        assert model(source.all()[own : own + 1].expand(1, 6, 2, 2), [0]).routing.selected_BK[0, 0] == j


def test_filled_prototypes_stay_in_the_ball(make_config: Configs, make_model: Model) -> None:
    config = make_config(frl={"norm_bound": 0.5})
    model = make_model(config)
    data = [np.arange(j, 20, 4) for j in range(4)]
    warm_start(model, Points(normal(20)), data, config)
    assert model.clients.frl.prototypes_NMd.norm(dim=-1).max() <= 0.5 * (1 + 1e-12)


def test_clients_with_one_domain_each_are_found_by_inputs_of_that_domain(
    make_config: Configs, make_model: Model
) -> None:
    rng = np.random.default_rng(0)
    domains = np.repeat(np.arange(4), 10)
    source = Points(torch.from_numpy(2 * rng.normal(size=(4, 6))[domains] + 0.2 * rng.normal(size=(40, 6))))
    config = make_config(data={"partition": "domain"})
    model = make_model(config)
    data = client_data(domains.tolist(), config)
    warm_start(model, source, data, config)
    top = model(source.all(), range(40)).routing.selected_BK[:, 0].numpy()
    for j, own in enumerate(data):
        assert len(set(domains[own])) == 1
        assert (top[own] == j).mean() > 0.9


def test_one_image_is_history_enough_for_a_single_client(make_config: Configs, make_model: Model) -> None:
    config = make_config(experts={"count": 1}, routing={"top_k": 1})
    model = make_model(config)
    warm_start(model, Points(normal(1)), [np.array([0])], config)
    assert model.query.linear.weight.isfinite().all()
    assert model.clients.frl.prototypes_NMd.isfinite().all()


def test_pooled_features_are_means_over_the_grid() -> None:
    class Maps:
        maps = np.random.default_rng(0).normal(size=(3, 6, 2, 4)).astype(np.float16)
        shape_of = np.zeros(3)

        def plain(self, index: int) -> tuple[object, None]:
            return self.maps[index], None

    pooled = pooled_features(Maps())  # type: ignore[arg-type]
    np.testing.assert_allclose(pooled, Maps.maps.astype(np.float64).mean(axis=(2, 3)), atol=1e-6)


def test_a_client_that_learns_alone_fits_its_own_labels_with_its_own_expert(
    make_config: Configs, make_model: Model
) -> None:
    config = make_config(train={"warm_start": {"local_epochs": 6}, "lr": 1e-2, "batch_size": 4})
    source = Points(normal(24))
    model, again, untaught = make_model(config), make_model(config), make_model(config)
    data = [np.arange(j, 24, 4) for j in range(4)]
    warm_start(model, source, data, config)
    query_dist = model.query(source.all()).detach()
    for j, own in enumerate(data):
        labels = torch.from_numpy(np.stack([source.plain(int(i))[1] for i in own]))
        before, after = (
            solo_objective(m.clients.experts[j], query_dist[own], source.all()[own], labels, config=config).total
            for m in (untaught, model)
        )
        assert after < 0.8 * before
    warm_start(again, source, data, config)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_after_the_warm_start_alone_the_top_expert_tells_the_domain_on_scenes(tmp_path: Path) -> None:
    settings = ["data.train_count=100", "data.val_count=50", f"data.cache_dir={tmp_path / 'cache'}"]
    config = load_config("quickstart", [*settings, "data.image_size=128", "train.warm_start.local_epochs=1"])
    run = open_run(config, tmp_path / "run", resume=False, report=Silent())
    assert run.validation is not None
    assert validate(run.trainer.model, *run.validation)["routing"]["nmi_domain_expert"] >= 0.5
    untaught = AirMoE(config, feature_dim=run.card.feature_dim, classes=len(run.card.classes), dilations=(1, 2, 3))
    assert validate(untaught, *run.validation)["routing"]["nmi_domain_expert"] < 0.5
