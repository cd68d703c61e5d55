"""Several workers give the steps of one: data parallelism is a way to compute, not another algorithm."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from airmoe_ray.config import Config
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.runtime import gradients
from airmoe_ray.runtime.workers import OneWorker, ProcessGroup, Workers, shard
from airmoe_ray.training.pixel_losses import Labelling
from airmoe_ray.training.trainer import Batch, Trainer

SETTINGS = {
    "experts": {"count": 4, "hidden": 16, "width": 16},
    "frl": {"dim": 8, "prototypes": 3},
    "routing": {"top_k": 2},
    "train": {"loss_stride": 1, "lr": 1e-2, "grad_clip": 1.0, "epochs": 2, "lambda_iou": 0.5},
}
STEPS = 20


def batches(sizes):
    draw = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        size = sizes[step % len(sizes)]
        features = torch.randn(size, 6, 3, 4, generator=draw, dtype=torch.float64)
        labels = torch.randint(0, 3, (size, 12, 16), generator=draw).to(torch.uint8)
        labels[0, :9] = 255  # workers see different numbers of void pixels
        yield features + 2 * torch.randn(size, 6, 1, 1, generator=draw, dtype=torch.float64), labels, step


def train(workers: Workers, sizes, shared_epochs=0):
    torch.set_num_threads(1)
    settings = {**SETTINGS, "train": {**SETTINGS["train"], "warm_start": {"shared_epochs": shared_epochs}}}
    config = Config.model_validate(settings)
    model = AirMoE(config, feature_dim=6, classes=3, dilations=(1, 2, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(workers.rank)  # not what the others have
    workers.follow_first(value for value in model.state_dict().values() if value.is_floating_point())
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    trainer = Trainer(model, config, total_steps=STEPS, labelling=Labelling(weight), workers=workers)
    losses = []
    for features, labels, step in batches(sizes):
        part = list(shard(range(len(features)), workers))
        ids = [step * 100 + i for i in part]
        losses.append(trainer.step(Batch(features[part], labels[part], ids)).loss.total.item())
        trainer.end_epoch()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def worker(rank, size, port, settings, out):
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    torch.save(train(ProcessGroup(), *settings), f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("workers", "sizes", "shared_epochs"),
    [(2, (16,), 0), (3, (7, 2, 1), 0), (2, (4, 3), 1)],
    ids=["even", "uneven, with fewer samples than workers", "with shared epochs"],
)
def test_workers_take_the_very_steps_of_one(workers, sizes, shared_epochs, tmp_path):
    losses, state = train(OneWorker(), sizes, shared_epochs)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (workers, port, (sizes, shared_epochs), str(tmp_path)), nprocs=workers)
    for rank in range(workers):
        theirs, their_state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert theirs == pytest.approx(losses, rel=1e-8)
        for name, value in state.items():
            torch.testing.assert_close(their_state[name], value, rtol=1e-8, atol=1e-9, msg=name)


def test_shards_are_contiguous_and_lose_nothing():
    for size in (1, 2, 3, 5):
        for length in range(12):
            parts = []
            for rank in range(size):
                workers = OneWorker()
                workers.rank, workers.size = rank, size
                parts += list(shard(range(length), workers))
            assert parts == list(range(length))


def counting_worker(rank, size, port, settings, out):
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    experts = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(6)).double()
    gradients.BUCKET_BYTES = 1  # a bucket each
    sent_before_the_end = []
    experts[0].weight.register_hook(lambda grad: sent_before_the_end.append(len(sent)))  # the last on the way back
    sent, plain = [], dist.all_reduce
    dist.all_reduce = lambda flat, **more: (sent.append(flat.numel()), plain(flat, **more))[1]
    inputs = torch.ones(1, 8, dtype=torch.float64)
    for used in settings[rank]:
        inputs = experts[used](inputs)
    workers = ProcessGroup()
    workers.backward(inputs.sum(), experts.parameters())
    torch.save([workers.bytes_sent, sent_before_the_end, [e.weight.grad is None for e in experts]], f"{out}/{rank}.pt")
    dist.destroy_process_group()


def test_gradients_leave_before_the_last_is_known_and_those_of_experts_nobody_used_stay(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(counting_worker, (2, port, [(0, 1, 5), (0, 5)], str(tmp_path)), nprocs=2)
    for rank in range(2):
        sent, before, unused = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert unused == [False, False, True, True, True, False]
        assert sent == 3 * 8 * (64 + 1)  # three of six experts, each with its flag
        assert before[0] >= 2  # who uses what, and the first buckets
