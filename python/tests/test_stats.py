"""`gpunvme stats --prometheus`, read by Prometheus's own parser."""

import os
import subprocess
from pathlib import Path

import pytest
from conftest import program
from prometheus_client.parser import text_string_to_metric_families

import gpunvme


def test_prometheus_reads_what_stats_prints(folder: Path) -> None:
    (folder / "file").write_bytes(b"x" * (1 << 20))
    stats = [program("gpunvme"), "stats", "--prometheus", str(folder)]
    text = subprocess.run(stats, check=True, capture_output=True, text=True).stdout
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["gpunvme_calls"].type == "counter"
    assert families["gpunvme_free_bytes"].type == "gauge"
    for name in ("request", "device"):
        family = families[f"gpunvme_{name}_duration_seconds"]
        assert family.type == "histogram"
        assert family.documentation
        last: dict[str, float] = {}
        for sample in family.samples:
            operation = sample.labels["operation"]
            if sample.name.endswith("_bucket"):
                assert sample.value >= last.get(operation, 0), "buckets are cumulative"
                last[operation] = sample.value
            if sample.name.endswith("_count"):
                assert sample.value == last[operation], "the last bucket has all"
        assert last


def test_a_mount_may_be_named_by_bytes(folder: Path) -> None:
    with gpunvme.Mount(os.fsencode(folder)) as mount:
        assert mount.path == str(folder)
    with pytest.raises(TypeError):
        gpunvme.Mount(7)  # type: ignore[arg-type]
