"""Ray Data over samples on a mount: each actor reads its batches straight into its GPU.

    python ray_means.py /data/images

Ray plans and places the work; samples travel through it as paths, and only results come back. On a cluster
each node has a volume of its own, with the files under the same paths.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
import torch

from gpunvme.data import Batches, Sample


class Means:
    """The mean of the bytes of each sample."""

    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        samples = [Sample(str(path)) for path in rows["path"]]
        (batch,) = Batches([samples], self.device, ahead=1)
        return {"path": rows["path"], "mean": [view.double().mean().item() for view in batch]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder of files on a mount")
    parser.add_argument("--actors", type=int, default=1, help="as many as there are GPUs, say")
    args = parser.parse_args()
    ray.init(num_gpus=torch.cuda.device_count(), include_dashboard=False, logging_level="ERROR")
    paths = [{"path": str(path)} for path in sorted(args.folder.iterdir()) if path.is_file()]
    means = ray.data.from_items(paths).map_batches(
        Means,
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=args.actors),
        num_gpus=1 if torch.cuda.is_available() else 0,
    )
    for row in sorted(means.take_all(), key=lambda row: row["path"]):
        print(f"{row['path']} {row['mean']:.3f}")


if __name__ == "__main__":
    main()
