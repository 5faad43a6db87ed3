"""The recipes of the guide, with volumes of this machine as nodes."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
from conftest import Volume, program
from test_safetensors import same

import gpunvme.safetensors as st

EXAMPLES = Path(__file__).parents[1] / "examples"
MANIFEST = EXAMPLES / "train.yaml"
#: The manifest of the mount itself.
MOUNTS = Path(__file__).parents[2] / "contrib" / "kubernetes" / "gpunvme.yaml"

#: What a process of a node does: saves its share of the rows of each tensor, and says that it has.
SAVE = """
import sys, numpy, gpunvme.safetensors as st
folder, rank, of, rows, seed = sys.argv[1], *map(int, sys.argv[2:])
values = numpy.random.default_rng(seed).random((rows, 1024), "f4")
share = slice(rank * rows // of, (rank + 1) * rows // of)
st.save_file({f"w.{rank}": numpy.ascontiguousarray(values[share])}, f"{folder}/model-{rank}.safetensors")
print("saved", flush=True)
sys.stdin.read()
"""

#: What a rank of the resumed job does: reads its rows, from whichever files have them.
LOAD = """
import sys, numpy, gpunvme.safetensors as st
folder, rank, of, rows, saved = sys.argv[1], *map(int, sys.argv[2:])
first, last = rank * rows // of, (rank + 1) * rows // of
found = []
for file in range(saved):
    begin, end = file * rows // saved, (file + 1) * rows // saved
    if begin < last and first < end:
        with st.safe_open(f"{folder}/model-{file}.safetensors", "np") as f:
            found.append(f.get_slice(f"w.{file}")[max(first, begin) - begin : min(last, end) - begin])
numpy.save(sys.argv[1] + f"/../rows-{rank}.npy", numpy.concatenate(found))
"""


#: What a rank of a job does that keeps its state in shares: saves them to its node's volume, or loads
#: its own of another number of shares, each with what they must be.
SHARED = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from gpunvme.checkpoint import Reader, Writer
what, folder = sys.argv[1:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
whole = {"w": torch.arange(3001 * 64.0).reshape(3001, 64), "v": torch.arange(70_001.0)}
if what == "save":
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    dcp.save({"model": state, "step": 10}, storage_writer=Writer(folder))
else:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in zeros.items()}
    loaded = {"model": state, "step": 0}
    dcp.load(loaded, storage_reader=Reader(folder))
    assert loaded["step"] == 10
    for name, tensor in whole.items():
        own = distribute_tensor(tensor, mesh, [Shard(0)]).to_local()
        assert torch.equal(loaded["model"][name].to_local(), own), name
print(f"{what} {dist.get_rank()} of {dist.get_world_size()} done", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def run(*command: object, **others: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **others)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_nodes_publish_one_checkpoint_and_a_fresh_one_has_all_of_it(folder, tmp_path):
    rows, gpunvme = 3001, program("gpunvme")
    store = tmp_path / "store"
    nodes = []
    for number in range(2):
        place = tmp_path / f"node{number}"
        place.mkdir()
        nodes.append(Volume(place, 1 << 30))
    try:
        for attempt in (1, 2):
            saving = []
            for rank, node in enumerate(nodes):
                step = node.path / "step-10"
                step.mkdir(exist_ok=True)
                if rank == 0:
                    index = {"weight_map": {f"w.{at}": f"model-{at}.safetensors" for at in range(2)}}
                    (step / "model.safetensors.index.json").write_text(json.dumps(index))
                words = [sys.executable, "-c", SAVE, step, rank, 2, rows, attempt]
                saving.append(subprocess.Popen([str(word) for word in words], stdin=-1, stdout=-1, text=True))
            for process in saving:
                assert process.stdout and process.stdout.readline() == "saved\n"
                process.kill()
                process.communicate()

            def publish(rank: int, attempt: int = attempt) -> str:
                step, share = nodes[rank].path / "step-10", f"{rank}/2"
                return run(gpunvme, "publish", step, store / "step-10", "--rank", share, "--attempt", attempt)

            assert "ranks done: 1 of 2" in publish(0)
            # What the other node has not published is no set, whatever the attempt before it left.
            with pytest.raises(AssertionError, match="it has no manifest"):
                run(gpunvme, "hydrate", "--published", store / "step-10", folder / "early")
            assert not (store / "step-10" / "model.safetensors.index.json").exists() or attempt == 2
            assert "ranks done: 2 of 2" in publish(1)
    finally:
        for node in nodes:
            node.kill()
            subprocess.run(["umount", "--lazy", node.path], check=False)

    fresh = folder / "step-10"
    run(gpunvme, "hydrate", "--published", store / "step-10", fresh)
    whole = numpy.random.default_rng(2).random((rows, 1024), "f4")
    halves = st.load_file(fresh, framework="np")
    assert same(halves, {"w.0": whole[: rows // 2], "w.1": whole[rows // 2 :]})
    ranks = [
        subprocess.Popen([sys.executable, "-c", LOAD, str(fresh), str(rank), "3", str(rows), "2"])
        for rank in range(3)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert (numpy.concatenate([numpy.load(folder / f"rows-{rank}.npy") for rank in range(3)]) == whole).all()


def test_the_job_of_kubernetes_brings_what_it_trains_on(folder, tmp_path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    service, job = yaml.safe_load_all(MANIFEST.read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    (first,), (trains,) = pod["initContainers"], pod["containers"]
    # Both see the mount and the registration socket, as containers.md asks for.
    volumes = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"]}
    assert volumes == {"data": "/data", "sockets": "/run/gpunvme"}
    for container in (first, trains):
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert {name: mount["mountPath"] for name, mount in mounts.items()} == volumes
        assert mounts["data"]["mountPropagation"] == "HostToContainer"
    assert pod["restartPolicy"] == "Never" and job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 16

    # The init container's commands, for the last of the nodes.
    source = tmp_path / "dataset"
    source.mkdir()
    for number in range(32):
        (source / f"part-{number:02}").write_bytes(bytes([number]) * 100_000)
    (step := tmp_path / "step").mkdir()
    (step / "model.safetensors").write_bytes(b"weights")
    command, flag, script = first["command"]
    assert (command, flag) == ("sh", "-ec")
    environment = {entry["name"]: entry.get("value") for entry in first["env"]}
    assert environment.pop("DATASET").startswith("s3://") and set(environment) <= {"AWS_REGION"}
    script = script.replace("/data/", f"{folder}/")
    told = {
        "DATASET": source.as_uri(),
        "JOB_COMPLETION_INDEX": "15",
        "PATH": f"{Path(program('gpunvme')).parent}:{os.environ['PATH']}",
    }
    (folder / "sets").mkdir()
    for _ in range(2):
        run(command, flag, script, env=told)
        there = sorted(path.name for path in (folder / "sets" / "dataset").iterdir() if path.name[0] != ".")
        assert there == ["part-15", "part-31"]
    assert re.search(r"torchrun .*--nnodes[= ]16", shlex.join(trains["command"]))


def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def two_nodes(place: Path) -> Iterator[list[Volume]]:
    """Two volumes, each of which stands for a node."""
    nodes = []
    try:
        for number in range(2):
            (place / f"node{number}").mkdir()
            nodes.append(Volume(place / f"node{number}", 1 << 30))
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["umount", "--lazy", node.path], check=False, capture_output=True)


def test_torchrun_on_two_nodes_saves_and_three_ranks_go_on_from_a_fresh_one(folder, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    program_file, gpunvme, store = tmp_path / "shared.py", program("gpunvme"), tmp_path / "store"
    program_file.write_text(SHARED)

    def torchrun(node: int, nodes: int, ranks: int, at: int, *arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={node}"]
        command += [f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={at}"]
        words = [str(word) for word in [*command, program_file, *arguments]]
        return subprocess.Popen(words, stdout=-1, stderr=-1, text=True)

    with two_nodes(tmp_path) as nodes:
        at = port()
        saving = [
            torchrun(number, 2, 1, at, "save", node.path / "step-10") for number, node in enumerate(nodes)
        ]
        for process in saving:
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, out + err
        # Each node has its own ranks' file, and the first the metadata.
        assert [len(list((node.path / "step-10").glob("*.distcp"))) for node in nodes] == [1, 1]
        assert [(node.path / "step-10" / ".metadata").exists() for node in nodes] == [True, False]
        for rank, node in enumerate(nodes):
            said = run(
                gpunvme,
                "publish",
                node.path / "step-10",
                store / "step-10",
                "--rank",
                f"{rank}/2",
                "--attempt",
                1,
            )
            assert f"ranks done: {rank + 1} of 2" in said
            node.kill()
    run(gpunvme, "hydrate", "--published", store / "step-10", folder / "step-10")
    loading = torchrun(0, 1, 3, port(), "load", folder / "step-10")
    out, err = loading.communicate(timeout=240)
    assert loading.returncode == 0, out + err
    # Ranks write to one pipe: lines may be pieces of several.
    assert [out.count(f"load {rank} of 3 done") for rank in range(3)] == [1, 1, 1]


def test_ray_reads_and_trains_on_the_nodes_that_have_the_data(tmp_path):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from ray.cluster_utils import Cluster

    rows = numpy.random.default_rng(1).random((16, 640, 17), "f4")
    (source := tmp_path / "source").mkdir()
    for number, part in enumerate(rows):
        (source / f"part-{number:02}").write_bytes(part.tobytes())
    with two_nodes(tmp_path) as nodes:
        cluster = Cluster()
        try:
            path = f"{Path(program('gpunvme')).parent}:{os.environ['PATH']}"
            for node in nodes:
                environment = {"GPUNVME_STAGE": str(node.path), "PATH": path}
                cluster.add_node(
                    num_cpus=2, env_vars=environment, include_dashboard=False, object_store_memory=100 << 20
                )
            cluster.wait_for_nodes()
            words = [
                EXAMPLES / "ray_nodes.py",
                source.as_uri(),
                "--address",
                cluster.address,
                "--results",
                tmp_path / "ray",
            ]
            out = run(sys.executable, *words, timeout=400, env=os.environ | {"PATH": path})
        finally:
            cluster.shutdown()
            ray.shutdown()
        count, mean = re.search(r"^(\d+) records on 2 nodes, mean ([\d.]+)$", out, re.MULTILINE).groups()
        assert int(count) == 16 * 640 and abs(float(mean) - rows[:, :, -1].mean(dtype="f8")) < 1e-5
        assert 0 < float(re.search(r"^loss ([\d.]+)$", out, re.MULTILINE)[1]) < 0.3
        # Each node has its half, and nothing else.
        there = [sorted(path.name for path in node.path.glob("file/**/part-*")) for node in nodes]
        assert sorted(there) == [
            [f"part-{number:02}" for number in range(first, 16, 2)] for first in range(2)
        ]


def test_the_manifests_are_what_kubernetes_takes():
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    for path in (MANIFEST, MOUNTS):
        documents = list(yaml.safe_load_all(path.read_text()))
        assert documents
        for document in documents:
            validator.validate(document, validator.latest_version(), strict=True)
            document["spec"]["no such field"] = 1
            with pytest.raises(validator.ValidationError):
                validator.validate(document, validator.latest_version(), strict=True)


def test_juicefs_keeps_its_cache_on_a_mount(folder, tmp_path):
    juicefs = shutil.which("juicefs")
    if juicefs is None:
        pytest.skip("juicefs is not installed")
    metadata, there = f"sqlite3://{tmp_path}/meta.db", tmp_path / "juicefs"
    (tmp_path / "objects").mkdir()
    run(juicefs, "format", "--storage", "file", "--bucket", f"{tmp_path}/objects/", metadata, "data")
    values = [numpy.random.default_rng(seed).bytes(9_000_000) for seed in range(4)]
    cache = folder / "cache"

    def mounted() -> None:
        run(
            juicefs,
            "mount",
            "-d",
            "--no-usage-report",
            "--cache-dir",
            cache,
            "--cache-size",
            "512",
            metadata,
            there,
        )

    mounted()
    try:
        for number, value in enumerate(values):
            (there / f"file{number}").write_bytes(value)
            assert (there / f"file{number}").read_bytes() == value
        run(juicefs, "umount", there)
        mounted()
        assert [(there / f"file{number}").read_bytes() for number in range(4)] == values
        cached = [path for path in cache.rglob("*") if path.is_file() and "raw" in path.parts]
        assert sum(path.stat().st_size for path in cached) >= 4 * 9_000_000
        # What is cached is read from there: the objects themselves are gone.
        shutil.rmtree(tmp_path / "objects")
        run(juicefs, "umount", there)
        mounted()
        assert [(there / f"file{number}").read_bytes() for number in range(4)] == values
    finally:
        subprocess.run([juicefs, "umount", "--force", there], check=False, capture_output=True)
