"""The algorithm over Ray gives what it gives in one process, to rounding."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from actors.processes.channel import ChannelActor
from actors.processes.cloud import Cloud
from actors.processes.expert_host import ExpertActor
from actors.rounds.calls import Pinned
from actors.rounds.messages import CloudSpec, HostSpec, Segment, Settings
from actors.rounds.patience import Patience
from actors.rounds.ray_clients import RayClients
from actors.rounds.ray_round import RayRound
from actors.rounds.replies import Overdue
from actors.rounds.roster import Host, Roster
from actors.rounds.stubs import ChannelCalls, HostCalls
from airmoe_ray.config import Config
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.features.preprocess import to_tensor
from airmoe_ray.model.moe import AirMoE, collaborate
from airmoe_ray.model.routing import Participants
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.storage.checkpoint import ModelCard, expert_file, load_weights, read_file, save_checkpoint
from airmoe_ray.storage.export import export_model

pytestmark = pytest.mark.usefixtures("own_ray")
CARD = ModelCard(["a", "b", "c"], [[0, 0, 0]] * 3, 6, [1, 2, 3], "none", "none")
SPLITS = [(7,), (3, 4), (1,) * 7]
CHANNELS = {
    "air": {"snr_db": 10},
    "dropped": {"gamma_th": 0.7},
    "substituted": {"gamma_th": 0.7, "truncation": "substitute"},
    "all faded": {"gamma_th": 50.0},
    "no fading": {"fading": "none"},
    "digital": {"kind": "digital", "gamma_th": 0.7},
    "ideal": {"kind": "ideal"},
}


class Pair:
    """A checkpoint in one process and the same one in actors."""

    def __init__(
        self,
        folder: Path,
        model: AirMoE,
        channel: ChannelCalls,
        hosts: Sequence[tuple[int, ...]],
        card: ModelCard = CARD,
    ) -> None:
        save_checkpoint(folder, model, card)
        self.card = card
        self.folder, self.model, self.config = folder, model.eval(), model.config
        self.channel = channel
        self.hosts = [self.host(clients) for clients in hosts]
        self.replica = self.host((2,), owner=False)

    def host(self, clients: tuple[int, ...], *, owner: bool = True) -> Host:
        files = [Pinned.put(read_file(expert_file(self.folder, client))) for client in clients]
        actor = ExpertActor.options(num_cpus=0, max_restarts=-1, max_task_retries=0)
        calls = HostCalls.start(actor, HostSpec(clients, self.config, self.card, replica=not owner), files)
        return Host(f"{clients}{owner}", calls, clients, owner)

    def clients(self, *hosts: Host) -> RayClients:
        roster = Roster(1, self.config.experts.count, self.channel, hosts or tuple(self.hosts))
        return RayClients(roster, classes=3, overdue=Overdue(Patience(60, slack_s=60)))

    @torch.inference_mode()
    def over_ray(
        self, features: Tensor, ids: Sequence[int], clients: RayClients | None = None, **changed: Any
    ) -> AirMoEOutput[RayRound]:
        query, config = self.model.query(features), changed_config(self.config, **changed)
        return collaborate(
            query,
            features,
            ids,
            clients or self.clients(),
            routing_config=config.routing,
            channel=config.channel,
            seed=config.seed,
            shared=self.model.shared,
        )

    @torch.inference_mode()
    def in_process(self, features: Tensor, ids: Sequence[int], **changed: Any) -> AirMoEOutput[Any]:
        config = changed_config(self.config, **changed)
        return self.model(features, ids, routing_config=config.routing, channel=config.channel)


def changed_config(config: Config, *, top_k: int = 2, **channel: Any) -> Config:
    blocks = config.model_dump()
    return Config.model_validate(blocks | {"routing": blocks["routing"] | {"top_k": top_k}, "channel": channel})


def batch_of(settings: Settings) -> Segment:
    k, snr_db = settings.routing.top_k, settings.channel.snr_db
    return Segment((1, 2, 3), (1, 2, 3), settings, (k,) * 3, (snr_db,) * 3, 1, 60.0)


def assert_close(left: Tensor, right: Tensor, tolerance: float) -> None:
    assert (left - right).abs().max() <= tolerance * right.abs().max()


@pytest.fixture(scope="module")
def pairs(own_ray: None, make_model: Callable[..., AirMoE], tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    """Four clients, two alone and two in one host, in float64; and all in one host in float32."""
    folder, model = tmp_path_factory.mktemp("pairs"), make_model(frl={"eta": 0.3})
    channel = ChannelCalls.start(ChannelActor.options(num_cpus=0), model.config.seed)
    single = make_model(frl={"eta": 0.3}).float()
    return [
        Pair(folder / "double", model, channel, [(0,), (1, 3), (2,)]),
        Pair(folder / "single", single, channel, [(0, 1, 2, 3)]),
    ]


@pytest.fixture
def double(pairs: list[Pair]) -> Pair:
    return pairs[0]


@pytest.fixture
def single(pairs: list[Pair]) -> Pair:
    return pairs[1]


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("channel", CHANNELS.values(), ids=CHANNELS)
def test_float64_agrees_to_rounding_for_any_split_of_the_batch(
    channel: dict[str, Any], top_k: int, double: Pair, make_features: Callable[..., Tensor]
) -> None:
    features, ids = make_features(7), list(range(7))
    one = double.in_process(features, ids, top_k=top_k, **channel)
    for split in SPLITS:
        cuts = zip(features.split(split), torch.tensor(ids).split(split), strict=True)
        parts = [double.over_ray(part, cut.tolist(), top_k=top_k, **channel) for part, cut in cuts]
        for name in ("logits_BChw", "beta_BK", "delta_BK", "rho_B", "nmse_B"):
            active = one.routing.active_BK if name == "delta_BK" else ...
            assert_close(torch.cat([getattr(p, name) for p in parts])[active], getattr(one, name)[active], 1e-9)
        for name in ("selected_BK", "transmit_BK", "active_BK", "all_faded_B"):
            assert torch.equal(torch.cat([getattr(p.routing, name) for p in parts]), getattr(one.routing, name))


def test_the_channels_of_the_comparison_really_truncate(double: Pair, make_features: Callable[..., Tensor]) -> None:
    features, ids = make_features(7), range(7)
    dropped, moved, faded = (
        double.in_process(features, ids, **CHANNELS[name]).routing for name in ("dropped", "substituted", "all faded")
    )
    assert not dropped.active_BK.all()
    assert not torch.equal(moved.transmit_BK, moved.selected_BK)
    assert faded.all_faded_B.all()


@pytest.mark.parametrize("channel", [CHANNELS["air"], CHANNELS["substituted"]], ids=["air", "substituted"])
def test_float32_agrees_where_routing_is_no_near_tie(
    channel: dict[str, Any], single: Pair, make_features: Callable[..., Tensor]
) -> None:
    features, ids = make_features(16).float(), range(16)
    one, other = single.in_process(features, ids, **channel), single.over_ray(features, ids, **channel)
    ranked = one.routing.prob_BN.sort(descending=True).values
    clear = (ranked[:, 1] - ranked[:, 2]) > 1e-4
    assert clear.sum() > 8
    assert_close(other.logits_BChw[clear], one.logits_BChw[clear], 1e-4)


def test_a_replica_answers_like_its_owner(double: Pair, make_features: Callable[..., Tensor]) -> None:
    features, ids = make_features(5), range(5)
    kept = [host for host in double.hosts if host.clients != double.replica.clients]
    other = double.over_ray(features, ids, double.clients(*kept, double.replica), top_k=4)
    assert_close(other.logits_BChw, double.in_process(features, ids, top_k=4).logits_BChw, 1e-9)


def test_renewal_over_ray_is_that_of_one_process_also_through_a_replica(
    double: Pair, make_features: Callable[..., Tensor]
) -> None:
    turns = double.clients(*double.hosts, double.replica)  # client 2: owner and replica in turn
    for seed in range(4):
        features, ids = make_features(5, seed=seed), range(5)
        double.in_process(features, ids).round.renew()
        double.over_ray(features, ids, turns).round.renew()
        double.replica.calls.adopt(double.hosts[2].calls.snapshots((2,)).get())
    frl = double.model.clients.frl
    for host in double.hosts:
        for client, content in host.calls.snapshots(host.clients).get().items():
            kept = safetensors.torch.load(content)
            torch.testing.assert_close(kept["prototypes"], frl.prototypes_NMd.detach()[client], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(kept["importance"], frl.importance_NM[client], rtol=1e-9, atol=1e-12)


def test_the_cloud_adds_its_own_head_and_leaves_out_who_is_to_be_left_out_as_in_one_process(
    double: Pair, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = make_config(experts={"shared": True}, cluster={"cloud_threads": 1, "call_deadline_s": 60})
    backbone = load_backbone(config.backbone)
    card = replace(CARD, feature_dim=backbone.dim, backbone_fingerprint=backbone.fingerprint)
    model = AirMoE(config, feature_dim=backbone.dim, classes=3, dilations=(1, 2, 3))
    pair = Pair(tmp_path / "c", model, double.channel, [(0, 1, 2, 3)], card)
    cloud = Cloud(CloudSpec(config, card), read_file(tmp_path / "c" / "cloud.safetensors"))
    cloud.connect(pair.clients().roster)
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 48, 3), dtype=np.uint8)
    features = backbone(to_tensor(list(images)))
    fused = pair.in_process(features, (1, 2, 3))
    everybody, routed = fused.logits_BChw, int(fused.routing.selected_BK[0, 0])
    choices = ({"only": routed}, {"only": "cloud"}, {"without": routed}, {"without": "cloud"})
    for whose in (Participants(**choice) for choice in choices):
        settings = Settings(config.routing, config.channel, participants=whose)
        answer = torch.from_numpy(cloud.segment(batch_of(settings), images).logits_BChw)
        with torch.inference_mode():
            expected = model(features, (1, 2, 3), participants=whose).logits_BChw
        assert_close(answer, expected, 1e-4)
        assert (answer - everybody).abs().max() > 1e-2 * everybody.abs().max()
    for channel in ({"snr_db": 0.0}, {"kind": "digital"}, {"kind": "ideal"}):
        settings = Settings(config.routing, config.channel.model_copy(update=channel))
        answer = torch.from_numpy(cloud.segment(batch_of(settings), images).logits_BChw)
        assert_close(answer, pair.in_process(features, (1, 2, 3), **channel).logits_BChw, 1e-4)
        own = model.shared(features)  # type: ignore[misc]
        assert (answer - own).abs().max() > 1e-2 * own.abs().max()  # the clients have their say, too


def test_the_cloud_has_seen_an_image_of_the_served_size_before_it_takes_requests(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    seen: list[tuple[int, ...]] = []

    class Watched(Cloud):
        def maps(self, images_BHW3: Any) -> Any:
            seen.append(images_BHW3.shape)
            return super().maps(images_BHW3)

    config = make_config(data={"image_size": 100})
    backbone = load_backbone(config.backbone)
    card = replace(CARD, feature_dim=backbone.dim, backbone_fingerprint=backbone.fingerprint)
    model = AirMoE(config, feature_dim=backbone.dim, classes=3, dilations=(1, 2, 3))
    save_checkpoint(tmp_path / "c", model, card)
    Watched(CloudSpec(config, card), read_file(tmp_path / "c" / "cloud.safetensors"))
    step = backbone.pad_multiple
    assert seen == [(1, -(-75 // step) * step, -(-100 // step) * step, 3)]


def test_the_cloud_refines_as_in_one_process(double: Pair, make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config(
        backbone={"name": "efficientnet_lite0"},
        experts={"refiner": 16},
        cluster={"cloud_threads": 1, "call_deadline_s": 60},
    )
    backbone = load_backbone(config.backbone)
    fine_dims = list(backbone.fine_dims)
    card = replace(CARD, feature_dim=backbone.dim, backbone_fingerprint=backbone.fingerprint, fine_dims=fine_dims)
    model = AirMoE(config, feature_dim=backbone.dim, classes=3, dilations=(1, 2, 3), fine_dims=fine_dims)
    assert model.refiner is not None
    torch.nn.init.normal_(model.refiner.correct.weight)  # it starts at zero, which any mistake would reproduce
    pair = Pair(tmp_path / "c", model, double.channel, [(0, 1, 2, 3)], card)
    cloud = Cloud(CloudSpec(config, card), read_file(tmp_path / "c" / "cloud.safetensors"))
    cloud.connect(pair.clients().roster)
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 96, 3), dtype=np.uint8)
    settings = Settings(config.routing, config.channel)
    result = cloud.segment(batch_of(settings), images)
    with torch.inference_mode():
        features, fine = backbone.maps(to_tensor(list(images)), fine=True)
        expected = model(features, (1, 2, 3), fine=fine)
    assert result.logits_BChw.shape[2:] == (16, 24)
    assert result.grid == (4, 6)  # what crossed the air is as coarse as ever
    assert_close(torch.from_numpy(result.logits_BChw), expected.logits_BChw, 1e-4)
    off = config.model_copy(update={"experts": config.experts.model_copy(update={"refiner": 0})})
    plain = Cloud(CloudSpec(off, card), read_file(tmp_path / "c" / "cloud.safetensors"))
    plain.connect(pair.clients().roster)
    coarse = plain.segment(batch_of(settings), images).logits_BChw
    assert_close(torch.from_numpy(coarse), expected.coarse_BChw, 1e-4)


def test_weights_stored_in_half_are_computed_in_full_precision_on_both_sides(
    double: Pair, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = make_config(experts={"shared": True}, cluster={"cloud_threads": 1, "call_deadline_s": 60})
    backbone = load_backbone(config.backbone)
    card = replace(CARD, feature_dim=backbone.dim, backbone_fingerprint=backbone.fingerprint)
    model = AirMoE(config, feature_dim=backbone.dim, classes=3, dilations=(1, 2, 3))
    pair = Pair(tmp_path / "whole", model, double.channel, [], card)
    export_model(pair.folder, tmp_path / "half", name="half")
    pair.folder = tmp_path / "half"
    pair.hosts = [pair.host((0, 1)), pair.host((2, 3))]
    load_weights(pair.folder, pair.model)
    cloud = Cloud(CloudSpec(config, card), read_file(pair.folder / "cloud.safetensors"))
    cloud.connect(pair.clients().roster)
    assert {parameter.dtype for part in (cloud.parts.query, cloud.parts.shared) for parameter in part.parameters()} == {  # type: ignore[union-attr]
        torch.float32
    }
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 48, 3), dtype=np.uint8)
    settings = Settings(config.routing, config.channel, renew=True)
    answer = cloud.segment(batch_of(settings), images)
    expected = pair.in_process(backbone(to_tensor(list(images))), (1, 2, 3))
    assert_close(torch.from_numpy(answer.logits_BChw), expected.logits_BChw, 1e-5)  # half has steps of 1e-3
    assert_close(torch.from_numpy(answer.rho_B), expected.rho_B, 1e-5)
    expected.round.renew()
    frl = pair.model.clients.frl
    for host in pair.hosts:
        for client, content in host.calls.snapshots(host.clients).get().items():
            kept = safetensors.torch.load(content)
            assert kept["prototypes"].dtype == torch.float32
            torch.testing.assert_close(kept["prototypes"], frl.prototypes_NMd.detach()[client], rtol=1e-5, atol=1e-6)
