"""Sets of an object store in a folder of a mount: the command ``gpunvme hydrate``, for programs."""

import asyncio
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from gpunvme._follow import Follower
from gpunvme._types import AnyPath

Progress = Callable[[int, int], None]
#: Bytes, or a text such as ``"500G"`` or ``"80%"``.
Quota = int | str


def stage(
    url: AnyPath,
    root: AnyPath | None = None,
    *,
    include: Iterable[str] = (),
    rank: tuple[int, int] | None = None,
    published: bool = False,
    pin: bool = False,
    quota: Quota | None = None,
    progress: Progress | None = None,
) -> Path:
    """Brings a set of objects into a folder below ``root``, and returns that folder.

    It runs the command ``gpunvme hydrate``, which has to be installed. What is there already is not
    fetched again; of several processes that stage the same set one fetches, and the others wait.

    Args:
        url: ``s3://BUCKET/PREFIX``, ``gs://``, ``az://``, ``https://``, ``file:///PATH``, or a folder.
        root: the folder that sets lie in, of a gpunvme mount; ``$GPUNVME_STAGE`` without it.
        include: patterns, of which a name in the set has to match one.
        rank: which share of the objects, from 0, and of how many: ``(node, nodes)``, say.
        published: fail unless the set was published whole.
        pin: never evict the set.
        quota: what the sets below ``root`` may hold together, in bytes, or as ``"500G"`` or ``"80%"`` of the
            filesystem: those that were not used for the longest time go before anything is fetched.
        progress: is called with the bytes that are done and those that are to be, on another thread. What it
            raises ends the command, and is raised here.

    Raises:
        FileNotFoundError: the command is not installed.
        ValueError: there is no root.
        RuntimeError: what the command could not do.
    """
    folder = place(url, root)
    options = limits(quota, root) + shares(rank)
    with running(url, folder, include, published, pin, progress, options=options) as process:
        process.wait()
    return folder


async def stage_async(
    url: AnyPath,
    root: AnyPath | None = None,
    *,
    include: Iterable[str] = (),
    rank: tuple[int, int] | None = None,
    published: bool = False,
    pin: bool = False,
    quota: Quota | None = None,
    progress: Progress | None = None,
) -> Path:
    """As :func:`stage`, for asyncio. Where the task is cancelled, the command is ended; what has
    arrived stays, and counts the next time."""
    folder = place(url, root)
    options = limits(quota, root) + shares(rank)
    with running(url, folder, include, published, pin, progress, options=options) as process:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait() -> None:
            process.wait()
            loop.call_soon_threadsafe(ended.set)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        try:
            await ended.wait()
        except asyncio.CancelledError:
            process.terminate()
            raise
        finally:
            waiting.join()
    return folder


def place(url: AnyPath, root: AnyPath | None) -> Path:
    """Where a set lies: sets of different places never lie in the same folder."""
    root, url = _root(root), os.fsdecode(url)
    place = url
    if "://" not in place:
        place = Path(place).resolve().as_uri()
    parts = urlsplit(place)
    names = [part for part in parts.path.split("/") if part]
    if any(part in (".", "..") for part in [parts.netloc, *names]):
        raise ValueError(f"{url}: . and .. are no names of objects")
    if parts.fragment:
        raise ValueError(f"{url}: a URL with a fragment (#) names no place of a store")
    return Path(root, parts.scheme, *([parts.netloc] if parts.netloc else []), *names)


def limits(quota: Quota | None, root: AnyPath | None) -> list[str]:
    """The options of the command for a quota of the sets below ``root``."""
    return [] if quota is None else [f"--quota={quota}", f"--sets={_root(root)}"]


def shares(rank: tuple[int, int] | None) -> list[str]:
    """Those for a share of the objects."""
    return [] if rank is None else [f"--rank={rank[0]}/{rank[1]}"]


def _root(root: AnyPath | None) -> str:
    root = root if root is not None else os.environ.get("GPUNVME_STAGE")
    if root is None:
        raise ValueError("where to? give the folder for sets, or set GPUNVME_STAGE")
    return os.fsdecode(root)


def _progress(line: str) -> tuple[int, int] | None:
    """Bytes that are done, and of how many, where a line says that and nothing else."""
    try:
        far = json.loads(line)
        return far["done"], far["of"]
    except (ValueError, TypeError, KeyError):
        return None


@contextmanager
def running(
    url: AnyPath,
    folder: Path,
    include: Iterable[str],
    published: bool,
    pin: bool,
    progress: Progress | None,
    follower: Follower | None = None,
    options: Iterable[str] = (),
) -> Iterator["subprocess.Popen[str]"]:
    """Runs the command while the block waits for it, and raises what it complained of. Where the block, or
    ``progress``, raises, the command is ended."""
    if isinstance(include, str):
        raise TypeError(f"include is one text, {include!r}: give a list of patterns")
    command = shutil.which("gpunvme")
    if command is None:
        raise FileNotFoundError("the command gpunvme is not in PATH: install it (scripts/install)")
    arguments = [command, "hydrate", "--progress"]
    arguments += [f"--include={pattern}" for pattern in include]
    arguments += options
    arguments += ["--follow"] * (follower is not None)
    arguments += ["--published"] * published + ["--pin"] * pin + ["--", os.fsdecode(url), os.fspath(folder)]
    said: list[str] = []
    failed: list[Exception] = []

    def listen(lines: Iterable[str]) -> None:
        for line in lines:
            far = _progress(line)
            if far is None:
                said.append(line)
            elif progress is not None and not failed:
                try:
                    progress(*far)
                except Exception as error:
                    failed.append(error)
                    process.terminate()

    stdin = subprocess.DEVNULL if follower is None else follower.other_end.fileno()
    with subprocess.Popen(
        arguments, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        listening = [threading.Thread(target=listen, args=(process.stderr,), daemon=True)]
        try:
            if follower is not None:
                follower.other_end.close()
                listening.append(threading.Thread(target=follower.listen, daemon=True))
            for thread in listening:
                thread.start()
            yield process
        except BaseException:
            process.terminate()
            raise
        finally:
            process.wait()
            if follower is not None:
                follower.has_ended()
            for thread in listening:
                if thread.ident is not None:
                    thread.join()
    if failed:
        raise failed[0]
    if process.returncode != 0:
        raise RuntimeError("".join(said).strip() or f"{command} ended with {process.returncode}")
