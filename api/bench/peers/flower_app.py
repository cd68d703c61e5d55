"""One model trained by FedAvg as a Flower simulation: clients take their share of each batch, then all are averaged.

`python -m api.bench.peers.flower_app FOLDER ROUNDS`, in an environment that has flwr and its Ray. `FOLDER` has what
`flower.py` put there; `times.json` is what comes back. Data and model stay in each worker between rounds, clients keep
one core each, and nothing is evaluated: as little besides training as Flower allows.
"""

import functools
import itertools
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from airmoe_ray.config import Config
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.training.trainer import Batch, Trainer


@functools.lru_cache(maxsize=1)
def _stored(folder: Path) -> dict[str, object]:
    stored: dict[str, object] = torch.load(folder / "data.pt", weights_only=True)
    return stored


def _model(folder: Path) -> AirMoE:
    stored = _stored(folder)
    config = Config.model_validate_json((folder / "config.json").read_text())
    return AirMoE(config, **stored["shape"])


@functools.lru_cache(maxsize=1)
def _learner(folder: Path) -> Trainer:
    torch.set_num_threads(1)
    model = _model(folder)
    return Trainer(model, model.config, total_steps=1000)


def _weights(model: AirMoE) -> dict[str, torch.Tensor]:
    """What can be averaged."""
    return {name: value for name, value in model.state_dict().items() if value.is_floating_point()}


def _share(batch: tuple[torch.Tensor, torch.Tensor, list[int]], client: int, clients: int) -> Batch:
    """Every `clients`-th image of a batch."""
    features_BDhw, labels_BHW, ids_B = batch
    return Batch(features_BDhw[client::clients], labels_BHW[client::clients], ids_B[client::clients])


def train_share(folder: Path, message: Message, context: Context) -> Message:
    """One epoch of one client."""
    client, clients = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    trainer, stored = _learner(folder), _stored(folder)
    trainer.model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    images = 0
    for batch in stored["batches"]:
        own = _share(batch, client, clients)
        if own.ids_B:
            trainer.step(own)
            images += len(own.ids_B)
    content = {"arrays": ArrayRecord(_weights(trainer.model)), "metrics": MetricRecord({"num-examples": images})}
    return Message(content=RecordDict(content), reply_to=message)


class AllOrNothing(FedAvg):
    """FedAvg that ends where a client has failed: a round without it would look fast."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> object:
        """The mean of all clients."""
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or not replies:
            raise RuntimeError(f"{len(failed)} of {len(replies)} clients failed: {failed[:1]}")
        return super().aggregate_train(server_round, replies)


def coordinate(folder: Path, rounds: int, grid: Grid) -> None:
    """Some rounds, and when each of them ended."""
    weights, ends = _weights(_model(folder)), []

    def mark(round_: int, arrays: ArrayRecord) -> None:
        ends.append(time.perf_counter())

    AllOrNothing(fraction_evaluate=0.0).start(grid, ArrayRecord(weights), num_rounds=rounds, evaluate_fn=mark)
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    sizes = {"seconds": seconds, "model_bits": 32 * sum(value.numel() for value in weights.values())}
    (folder / "times.json").write_text(json.dumps(sizes))


def main() -> None:
    """Simulate, then leave."""
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    client_app, server_app = ClientApp(), ServerApp()
    client_app.train()(functools.partial(train_share, folder))

    @server_app.main()
    def lead(grid: Grid, context: Context) -> None:
        coordinate(folder, rounds, grid)

    config = Config.model_validate_json((folder / "config.json").read_text())
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=config.experts.count, backend_config=resources)


if __name__ == "__main__":
    from api.bench.peers.flower_app import main as importable_main  # workers must find the functions by their real name

    importable_main()
