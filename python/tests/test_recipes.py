"""The recipes of the guide, with volumes of this machine as nodes."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from conftest import Volume, program
from test_safetensors import same

import gpunvme.safetensors as st

MANIFEST = Path(__file__).parents[1] / "examples" / "train.yaml"

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
