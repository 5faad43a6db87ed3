"""LMCache on gpunvme.

Its slab of GPU memory on disk (GDS L1), in the order of CUDA streams:

    python -m gpunvme.lmcache server --gds-l1-path /data/kv --gds-l1-backend gpunvme ...

where ``server ...`` is what the command ``lmcache`` is given. Chunks as files, for the engine's own process,
by its configuration:

    storage_plugins: ["gpunvme"]
    extra_config:
      storage_plugin.gpunvme.module_path: gpunvme.lmcache.storage
      storage_plugin.gpunvme.class_name: Storage
      gpunvme.path: /data/kv

Both must lie on a mount of gpunvme.
"""

from pathlib import Path

__all__ = ["register"]


def register() -> None:
    """Lets LMCache find the backend ``gpunvme`` of GDS L1: it looks for modules in a package's folders."""
    from lmcache.v1.gpu_connector import gds_backends

    folder = str(Path(__file__).with_name("gds_backends"))
    if folder not in gds_backends.__path__:
        gds_backends.__path__.append(folder)
