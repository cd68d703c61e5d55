import pytest
import torch

from airmoe_ray.experiments.report.tokens import compared, token_map


@pytest.mark.parametrize("sim", ["clr_cosine", "cosine", "dot"])
def test_points_lie_where_a_read_compares_them(make_model, make_features, sim):
    """Products of queries and prototypes, scaled and normalised, must be the attention of Eq. (9)."""
    model = make_model(frl={"sim": sim})
    query_dist = model.query(make_features(5))
    frl = model.clients.frl
    alpha = frl.read(query_dist).alpha_BNM[:, 1]
    queries, prototypes = compared(query_dist, frl.prototypes_NMd[1], sim)
    found = torch.from_numpy(frl.config.sim_scale * queries @ prototypes.T).softmax(dim=-1)
    assert torch.allclose(found, alpha.detach(), atol=1e-9)


def test_distances_tell_a_collapsed_library(make_model, make_features):
    model = make_model().float()
    features = make_features(1, grid=(6, 8))[0].float()
    apart = token_map(model, features, 2, seed=0)
    with torch.no_grad():
        model.clients.frl.prototypes_NMd[2] = model.clients.frl.prototypes_NMd[2, :1]
    collapsed = token_map(model, features, 2, seed=0)
    assert apart.among_prototypes > 0.1
    assert collapsed.among_prototypes == pytest.approx(0, abs=1e-3)
    assert collapsed.among_tokens == pytest.approx(apart.among_tokens)
    assert collapsed.tokens_T2.shape == (48, 2)
    assert collapsed.prototypes_M2.shape == (3, 2)


def test_an_image_of_one_token_is_its_own_query(make_model, make_features):
    model = make_model().float()
    with torch.no_grad():  # a prototype where the query is
        features = make_features(1, grid=(1, 1))[0].float()
        model.clients.frl.prototypes_NMd[0, 1] = model.query(features[None])[0].log()
    seen = token_map(model, features, 0, seed=0)
    assert seen.query_to_nearest == pytest.approx(0, abs=1e-3)
    assert seen.to_nearest == pytest.approx(seen.query_to_nearest, abs=1e-3)
