"""Trains a small model on all GPUs of a node, and goes on after a failure from the last checkpoint.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py /data

Each rank reads its own part of a data set of fixed records, and writes its own part of each checkpoint. When
a process dies, torchrun begins all of them again, and they resume; they may be more or fewer than before.
Without GPUs it runs on the host, by gloo.
"""

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from gpunvme.checkpoint import Reader, Writer
from gpunvme.data import Batches, Records

FEATURES = 64
#: Bytes of a record: the features and the value to be found, as float32.
RECORD = 4 * (FEATURES + 1)


def make_data(path: Path, records: int) -> None:
    """Records of random features, with the value of a function of them."""
    rows = torch.randn(records, FEATURES, generator=torch.Generator().manual_seed(1))
    values = rows.square().mean(1, keepdim=True)
    path.write_bytes(torch.cat([rows, values], 1).numpy().tobytes())


def last_checkpoint(folder: Path) -> Path | None:
    """The newest that is whole: its metadata comes last, under its name when all else is durable. It is
    read all the same: what another writer, or a copy, has left may be cut."""
    found = [path.parent for path in folder.glob("step-*/.metadata")]
    for path in sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True):
        try:
            Reader(path).read_metadata()
        except Exception as error:  # bytes that are no pickle raise many kinds
            print(f"{path} is no checkpoint ({error!r}): an older one is looked for", flush=True)
        else:
            return path
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder of a mount, for data and checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--records", type=int, default=32_000, help="of the data set, where it is made")
    parser.add_argument("--batch", type=int, default=64, help="records of a step, of all ranks together")
    parser.add_argument("--die-at", type=int, help="the step at which the last rank is killed, once")
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)

    data = args.folder / "records"
    if rank == 0 and not data.exists():
        make_data(data, args.records)
    dist.barrier()

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(FEATURES, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Resume: what is loaded takes the place of what is there, whichever ranks wrote it.
    begin = 0
    if found := last_checkpoint(args.folder):
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, storage_reader=Reader(found))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        begin = state["step"]
        if rank == 0:
            print(f"resumed at step {begin} with {world} ranks", flush=True)

    samples = Records([data], RECORD)
    # Each rank takes every world-th record, so that a batch is the same for any number of ranks.
    sampler = DistributedSampler(samples, world, rank, shuffle=False)
    loader = DataLoader(samples, batch_size=args.batch // world, sampler=sampler, collate_fn=list)
    for step, batch in enumerate(Batches(loader, device, skip=begin), start=begin + 1):
        rows = batch.stack(torch.float32)
        loss = torch.nn.functional.mse_loss(model(rows[:, :FEATURES]), rows[:, FEATURES:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == args.die_at and rank == world - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if step % args.every == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            dcp.save(state, storage_writer=Writer(args.folder / f"step-{step}"))
        if step == args.steps:
            break

    if rank == 0:
        digest = hashlib.sha256()
        for parameter in net.parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
        print(f"step {args.steps}: loss {loss.item():.6f}, weights {digest.hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
