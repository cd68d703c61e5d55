import numpy as np
import pytest

from airmoe_ray.experiments.report.tsne import affinities, squared_distances, tsne


def on_a_ring(count: int) -> np.ndarray:
    angles = 2 * np.pi * np.arange(count) / count
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


@pytest.mark.parametrize("perplexity", [3.0, 10.0])
def test_affinities_have_the_perplexity_that_was_asked_for(perplexity):
    count = 40
    joint = affinities(on_a_ring(count), perplexity=perplexity)
    assert joint.sum() == pytest.approx(1)
    assert np.allclose(joint, joint.T)
    assert not joint.diagonal().any()
    row = count * joint[0]  # on a ring all rows are alike, so that symmetrising changes nothing
    assert np.exp(-(row * np.log(np.maximum(row, 1e-300))).sum()) == pytest.approx(perplexity, rel=1e-6)


def test_clusters_stay_apart_and_the_same_points_get_the_same_places():
    draw = np.random.default_rng(0)
    centres = 8 * draw.standard_normal((3, 20))
    cluster = np.repeat(np.arange(3), 25)
    points = centres[cluster] + draw.standard_normal((75, 20))
    places = tsne(points)
    apart = squared_distances(places) + np.diag(np.full(75, np.inf))
    assert (cluster[apart.argmin(axis=1)] == cluster).all()
    means = np.stack([places[cluster == c].mean(axis=0) for c in range(3)])
    spread = max(float(places[cluster == c].std(axis=0).max()) for c in range(3))
    assert np.sqrt(squared_distances(means) + np.diag(np.full(3, np.inf))).min() > 3 * spread
    assert np.array_equal(places, tsne(points))


def test_points_that_coincide_do_no_harm():
    places = tsne(np.ones((12, 5)))
    assert np.isfinite(places).all()
