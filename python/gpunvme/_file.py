"""Files, with what asyncio needs on top of the native part."""

import asyncio
import os
import threading
from typing import Literal
from weakref import WeakKeyDictionary

from gpunvme import _native
from gpunvme._native import Completions, Transfer
from gpunvme._types import AnyPath, Caching, Memory, Require


class _Waiting:
    """Requests that an event loop waits for.

    One descriptor tells the loop that requests are done, whichever files and memory they are of. It
    is watched while there are any.
    """

    def __init__(self) -> None:
        self.completions = Completions()
        self.futures: dict[int, asyncio.Future[Transfer]] = {}
        self.last = 0

    @staticmethod
    def here() -> "tuple[asyncio.AbstractEventLoop, _Waiting]":
        loop = asyncio.get_running_loop()
        with _LOCK:
            waiting = _OF_LOOP.get(loop)
            if waiting is not None:
                return loop, waiting
            # Futures refer to their loop: one that was closed with requests in flight stays here.
            closed = [_OF_LOOP.pop(other) for other in list(_OF_LOOP) if other.is_closed()]
            waiting = _OF_LOOP[loop] = _Waiting()
        for other in closed:
            # What is done lets go of its memory. What is in flight has it until it is over.
            other.completions.take()
        return loop, waiting

    def add(self, loop: asyncio.AbstractEventLoop) -> "tuple[int, asyncio.Future[Transfer]]":
        if not self.futures:
            loop.add_reader(self.completions.fileno(), self._take, loop)
        self.last += 1
        future: asyncio.Future[Transfer] = loop.create_future()
        self.futures[self.last] = future
        return self.last, future

    def remove(self, loop: asyncio.AbstractEventLoop, number: int) -> "asyncio.Future[Transfer] | None":
        future = self.futures.pop(number, None)
        if not self.futures:
            loop.remove_reader(self.completions.fileno())
        return future

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        for number, result in self.completions.take():
            future = self.remove(loop, number)
            if future is None or future.done():
                continue  # its task was cancelled, and the transfer went on
            if isinstance(result, Transfer):
                future.set_result(result)
            else:
                future.set_exception(result)


_LOCK = threading.Lock()
_OF_LOOP: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Waiting]" = WeakKeyDictionary()


class File(_native.File):
    __doc__ = _native.File.__doc__

    async def read_into_async(
        self, memory: Memory, offset: int = 0, *, require: Require | None = None
    ) -> Transfer:
        """As :meth:`read_into`, for asyncio.

        No thread waits for it: the event loop watches one descriptor for all requests. Those of host
        memory are done by four threads; where the stream of a GPU's memory still has work to do, a thread
        waits for that first. A task that is cancelled does not end its transfer: the memory is kept, and
        may change, until that is over. It must not be resized before.
        """
        return await self._transfer(False, memory, offset, require)

    async def write_from_async(
        self, memory: Memory, offset: int = 0, *, require: Require | None = None
    ) -> Transfer:
        """As :meth:`write_from`, for asyncio; see :meth:`read_into_async`."""
        return await self._transfer(True, memory, offset, require)

    async def _transfer(self, write: bool, memory: Memory, offset: int, require: Require | None) -> Transfer:
        loop, waiting = _Waiting.here()
        number, future = waiting.add(loop)
        try:
            self._submit_to(write, memory, offset, require, (waiting.completions, number))
        except BaseException:
            waiting.remove(loop, number)
            raise
        return await future


def open(
    path: AnyPath,
    mode: Literal["r", "r+", "w"] = "r",
    *,
    caching: Caching | None = None,
) -> File:
    """Opens a file of a mount.

    Args:
        path: the file.
        mode: ``"r"`` to read, ``"r+"`` to read and write, ``"w"`` to read and write an empty file,
            which is created where there is none.
        caching: what reads into memory that CUDA knows take of the kernel's page cache, with the
            route ``cache``: ``"resident"``, what it has (the usual); ``"never"``, what
            :meth:`File.prepare` registered and nothing else; ``"read-again"``, what it has, and the
            kernel reads in what is read again.

    Raises:
        Error: it lies on no mount of gpunvme (ENOTTY), or what open(2) says.
    """
    return File(os.fsdecode(path), mode, caching=caching)
