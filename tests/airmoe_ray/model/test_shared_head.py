"""A head of the cloud's own beside the routed experts (`experts.shared`)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from airmoe_ray.config import Config
from airmoe_ray.errors import CheckpointError
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.storage.checkpoint import ModelCard, cloud_tensors, expert_tensors, load_weights, save_checkpoint
from airmoe_ray.training.constraints import check_constraints
from airmoe_ray.training.losses import objective
from airmoe_ray.training.trainer import Batch, Trainer

Configs, Model, Features = Callable[..., Config], Callable[..., AirMoE], Callable[..., Tensor]
CHANNELS = [{"kind": "air", "snr_db": 10.0}, {"kind": "air", "gamma_th": 50.0}, {"kind": "digital"}, {"kind": "ideal"}]
CARD = ModelCard(["a", "b", "c"], [[0, 0, 0]] * 3, 6, [1, 2, 3], "none", "none")


@pytest.mark.parametrize("channel", CHANNELS, ids=["air", "all faded", "digital", "ideal"])
def test_logits_are_the_clouds_own_plus_what_the_air_delivers_without_it(
    channel: dict[str, float], make_model: Model, make_features: Features
) -> None:
    model, features = make_model(experts={"shared": True}, channel=channel), make_features(5)
    assert model.shared is not None
    both = model(features, range(5))
    own, model.shared = model.shared, None
    alone = model(features, range(5))
    torch.testing.assert_close(both.logits_BChw, own(features) + alone.logits_BChw, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(both.nmse_B, alone.nmse_B)  # the distortion is that of the transmission


def test_where_routed_experts_are_silent_the_answer_is_the_clouds_own(
    make_model: Model, make_features: Features
) -> None:
    model, features = make_model(experts={"shared": True}), make_features(5)
    for expert in model.clients.experts:
        torch.nn.init.zeros_(expert.decoder.weight)
    output = model(features, range(5))
    assert output.logits_BChw.isfinite().all()
    torch.testing.assert_close(output.logits_BChw, model.shared(features), rtol=1e-6, atol=1e-6)


def test_noise_reaches_only_what_is_sent_so_smaller_residuals_leave_less_of_it(
    make_model: Model, make_features: Features
) -> None:
    model, features = make_model(experts={"shared": True}, channel={"snr_db": 0.0}), make_features(6)
    ideal = model.config.channel.model_copy(update={"kind": "ideal", "gamma_th": 0.0})
    noisy = model.config.channel.model_copy(update={"gamma_th": 0.0})
    errors = []
    for _ in range(2):
        exact = model(features, range(6), channel=ideal).logits_BChw
        errors.append(model(features, range(6), channel=noisy).logits_BChw - exact)
        for expert in model.clients.experts:
            expert.decoder.weight.data *= 0.1
            expert.decoder.bias.data *= 0.1
    torch.testing.assert_close(errors[1], 0.1 * errors[0], rtol=1e-6, atol=1e-9)


def test_one_step_moves_the_shared_head_and_every_routed_expert_and_keeps_the_constraints(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    config = make_config(experts={"shared": True}, routing={"top_k": 4}, channel={"gamma_th": 0.0})
    model, labels = make_model(config), torch.randint(0, 3, (4, 3, 4), generator=torch.Generator().manual_seed(0))
    output = model(make_features(4), range(4))
    check_constraints(output, config)
    objective(output, labels, model.clients.frl, config=config).total.backward()
    heads = [model.shared, *model.clients.experts]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for head in heads for p in head.parameters())
    trainer, before = Trainer(model, config, total_steps=4), [head.decoder.weight.detach().clone() for head in heads]
    trainer.step(Batch(make_features(4), labels, list(range(4))))
    assert not any(torch.equal(head.decoder.weight, was) for head, was in zip(heads, before, strict=True))


def test_the_loss_weighs_the_heads_own_cross_entropy_which_no_expert_feels(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    labels = torch.randint(0, 3, (4, 3, 4), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for weight in (0.0, 0.5):
        config = make_config(experts={"shared": True}, train={"lambda_shared": weight})
        model = make_model(config)
        loss = objective(model(make_features(4), range(4)), labels, model.clients.frl, config=config)
        loss.total.backward()
        losses.append(loss)
        gradients.append([p.grad for head in (model.clients.experts, model.shared) for p in head.parameters()])
        own = cross_entropy(model.shared(make_features(4)), labels)
    torch.testing.assert_close(losses[1].total - losses[0].total, 0.5 * own)
    experts = len(list(model.clients.experts.parameters()))
    pairs = list(zip(*gradients, strict=True))
    assert all(a is b or torch.equal(a, b) for a, b in pairs[:experts])
    assert not any(torch.equal(a, b) for a, b in pairs[experts:])


def test_training_may_route_to_fewer_clients_than_answering(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    config = make_config(routing={"top_k": 3}, train={"top_k": 1, "check_constraints": True})
    model = make_model(config)
    labels = torch.zeros(4, 3, 4, dtype=torch.long)
    result = Trainer(model, config, total_steps=4).step(Batch(make_features(4), labels, list(range(4))))
    assert result.selected_BK.shape == (4, 1)
    assert model(make_features(4), range(4)).beta_BK.shape == (4, 3)


def test_in_shared_epochs_the_clouds_head_learns_alone_and_clients_start_from_a_faint_copy(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    blocks = {"experts": {"shared": True, "shared_start": 0.25}, "channel": {"kind": "ideal"}}
    config = make_config(train={"epochs": 2, "warm_start": {"shared_epochs": 1}}, **blocks)
    model, features = make_model(config), make_features(4)
    trainer = Trainer(model, config, total_steps=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    labels = torch.randint(0, 3, (4, 3, 4), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        trainer.step(Batch(features, labels, list(range(4))))
    moved = {name.split(".")[0] for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"shared"}
    trainer.end_epoch()
    torch.testing.assert_close(model(features, range(4)).logits_BChw, 1.25 * model.shared(features))


def test_the_clouds_file_holds_its_head_and_no_clients_file_does(tmp_path: Path, make_model: Model) -> None:
    model = make_model(experts={"shared": True})
    save_checkpoint(tmp_path / "c", model, CARD)
    again = make_model(experts={"shared": True}, seed=1)
    load_weights(tmp_path / "c", again)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert any(name.startswith("shared.") for name in cloud_tensors(model.cloud))
    assert not any("shared" in name for j in range(4) for name in expert_tensors(model.clients, j))
    with pytest.raises(CheckpointError, match="another architecture"):
        load_weights(tmp_path / "c", make_model())
