"""Ray on nodes that each have a volume: each gets a share of a dataset, reads it and trains on it.

    python ray_nodes.py s3://bucket/dataset

On each node $GPUNVME_STAGE names the folder of its mount that sets lie in. Ray Data reads each share in a
task on the node that has it; of Ray Train's workers, one a node, each trains on what its own node has. The
objects are records of float32: features, and the value to be found.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy
import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import gpunvme
from gpunvme.data import Batches, Records

FEATURES = 16
RECORD = 4 * (FEATURES + 1)


def files(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).iterdir() if path.is_file())


@ray.remote(num_cpus=0)
def bring(url: str, number: int, nodes: int) -> str:
    """Brings the node's share; what is there is not fetched again."""
    return str(gpunvme.stage(url, rank=(number, nodes)))


class Sums:
    """What Ray Data computes of the files of one node: how many records, and the sum of their values."""

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        counts, sums = [], []
        for path in rows["path"]:
            data = numpy.empty(Path(path).stat().st_size, numpy.uint8)
            gpunvme.open(path).read_into(data)
            records = data.view("f4").reshape(-1, FEATURES + 1)
            counts.append(len(records))
            sums.append(records[:, -1].sum(dtype="f8"))
        here = ray.get_runtime_context().get_node_id()
        return {"node": [here] * len(counts), "count": counts, "sum": sums}


def train(config: dict[str, Any]) -> None:
    """One worker: epochs over the records that its node has."""
    here = config["folders"][ray.get_runtime_context().get_node_id()]
    model = prepare_model(torch.nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    device = next(model.parameters()).device
    records = Records(files(here), RECORD)
    # All workers make as many steps.
    least = torch.tensor(len(records) // 64)
    if dist.is_initialized():
        dist.all_reduce(least, dist.ReduceOp.MIN)
    for epoch in range(config["epochs"]):
        order = torch.randperm(len(records), generator=torch.Generator().manual_seed(epoch)).tolist()
        steps = [[records[at] for at in order[64 * step : 64 * (step + 1)]] for step in range(int(least))]
        total = 0.0
        for batch in Batches(steps, device):
            rows = torch.stack([view.view(torch.float32) for view in batch])
            loss = (model(rows[:, :FEATURES]).squeeze(1) - rows[:, FEATURES]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        with tempfile.TemporaryDirectory() as place:
            torch.save(model.state_dict(), f"{place}/model.pt")
            is_first = ray.train.get_context().get_world_rank() == 0
            checkpoint = ray.train.Checkpoint.from_directory(place) if is_first else None
            ray.train.report({"loss": total / len(steps), "folder": here}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="the dataset")
    parser.add_argument("--address", default="auto", help="of the cluster")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--results", default=None, help="a folder that all nodes see, for what Ray Train keeps"
    )
    args = parser.parse_args()
    ray.init(args.address, logging_level="ERROR")
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))

    def there(node: str) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(node, soft=False)

    staged = [
        bring.options(scheduling_strategy=there(node)).remote(args.url, number, len(nodes))
        for number, node in enumerate(nodes)
    ]
    folders = dict(zip(nodes, ray.get(staged), strict=True))

    @ray.remote(num_cpus=0)
    def names(folder: str) -> list[dict[str, str]]:
        return [{"path": str(path)} for path in files(folder)]

    count, total = 0, 0.0
    for node, folder in folders.items():
        paths = ray.get(names.options(scheduling_strategy=there(node)).remote(folder))
        sums = ray.data.from_items(paths).map_batches(
            Sums,
            batch_size=16,
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=1,
            scheduling_strategy=there(node),
        )
        rows = sums.take_all()
        assert all(row["node"] == node for row in rows), "read where it lies"
        count += sum(row["count"] for row in rows)
        total += sum(row["sum"] for row in rows)
    print(f"{count} records on {len(nodes)} nodes, mean {total / count:.6f}")

    trainer = TorchTrainer(
        train,
        train_loop_config={"folders": folders, "epochs": args.epochs},
        scaling_config=ScalingConfig(
            num_workers=len(nodes), use_gpu=torch.cuda.is_available(), placement_strategy="STRICT_SPREAD"
        ),
        run_config=ray.train.RunConfig(storage_path=args.results),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.6f}")


if __name__ == "__main__":
    main()
