"""Renewal over thousands of inputs: by the default rule prototypes follow their own kind of input, none collapse."""

import numpy as np
import pytest
import torch
from torch import Tensor

from airmoe_ray.config import FrlConfig
from airmoe_ray.model.frl import FeatureRetrievalLibrary

KINDS, DIM, BATCH, ROUNDS = 8, 16, 16, 400


def renewed(seed: int, **rule: object) -> tuple[Tensor, Tensor]:
    """A client's prototypes after many renewals, each begun near its own kind of input, and those kinds, (M, d).

    Kinds have much in common, as pictures of one dataset do (cosine about 0.9); psi is the query's own logits.
    """
    rng = np.random.default_rng(seed)
    config = FrlConfig.model_validate({"dim": DIM, "prototypes": KINDS, **rule})
    frl = FeatureRetrievalLibrary(config, [KINDS], generator=torch.Generator().manual_seed(seed)).double()

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape))

    kinds_Md = normal(1, DIM) + 0.3 * normal(KINDS, DIM)
    kinds_Md = kinds_Md - kinds_Md.mean(dim=-1, keepdim=True)
    with torch.no_grad():
        frl.prototypes_NMd[0] = kinds_Md + 0.1 * normal(KINDS, DIM)
    for _ in range(ROUNDS):
        psi_Bd = kinds_Md[rng.integers(KINDS, size=BATCH)] + 0.15 * normal(BATCH, DIM)
        alpha_BNM = frl.read(psi_Bd.softmax(dim=-1)).alpha_BNM.detach()
        frl.renew(alpha_BNM, psi_Bd[:, None], torch.ones(BATCH, 1, dtype=torch.bool))
    return frl.prototypes_NMd[0].detach(), kinds_Md


def relative(distance: Tensor, values_Md: Tensor) -> Tensor:
    return distance / values_Md.norm(dim=-1)


@pytest.mark.parametrize("seed", range(3))
def test_by_the_default_rule_each_prototype_ends_at_its_own_kind_of_input(seed: int) -> None:
    prototypes_Md, kinds_Md = renewed(seed)
    assert relative((prototypes_Md - kinds_Md).norm(dim=-1), kinds_Md).max() < 0.1  # seeds 0-4: 0.016-0.042


@pytest.mark.parametrize("seed", range(3))
def test_by_soft_renewal_all_prototypes_end_at_one_point(seed: int) -> None:
    """The collapse that the rule above is there to prevent, so that this test is known to see one."""
    prototypes_Md, _ = renewed(seed, renewal="soft", sim_scale=10.0)
    widest = torch.cdist(prototypes_Md, prototypes_Md).amax(dim=-1)
    assert relative(widest, prototypes_Md).max() < 0.05
