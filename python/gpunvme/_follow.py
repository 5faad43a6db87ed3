"""What the command ``gpunvme hydrate`` tells of files that arrive, and the memory that it lends meanwhile."""

import json
import mmap
import os
import queue
import socket
import struct
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from gpunvme._native import LentMemory

#: Bytes of an event at most: names of objects may be long.
_LONGEST = 64 << 10

#: One key, which says what happened, and of what.
Event = dict[str, Any]


class Lent:
    """A part of a file in memory of the command's, to be copied from and given back."""

    def __init__(self, follower: "Follower", buffer: int, offset: int) -> None:
        self._follower, self._buffer, self._offset = follower, buffer, offset
        self._mapping, self._memory = follower.buffers[buffer]

    def read(self, length: int, offset: int) -> bytes:
        """Bytes of the file."""
        start = offset - self._offset
        return self._mapping[start : start + length]

    def copy_into(self, pairs: list[tuple[Any, int]]) -> None:
        """Copies bytes of the file: pairs of memory and where its bytes begin in the file."""
        self._memory.copy_into([(memory, offset - self._offset) for memory, offset in pairs])

    def give_back(self) -> None:
        """It is not read any more."""
        self._follower.give_back(self._buffer)


class Follower:
    """This end of the socket. The command has the other one as its standard input."""

    def __init__(self) -> None:
        self._socket, self.other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Whatever the program has set as the default for its sockets.
        self._socket.setblocking(True)
        self.other_end.setblocking(True)
        #: Memory of the command's, by the names that it gave.
        self.buffers: dict[int, tuple[mmap.mmap, LentMemory]] = {}
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def listen(self) -> None:
        """Takes events as they come, until the command has closed its end."""
        try:
            while True:
                text, descriptors = self._receive()
                if not text:
                    break
                event = json.loads(text)
                if "lent" not in event or self._maps(event["lent"], descriptors):
                    self._events.put(event)
        except (OSError, ValueError):
            # It ended in the middle of something.
            pass
        finally:
            self._events.put(None)

    def _receive(self) -> tuple[bytes, list[int]]:
        """A message, and the descriptors that came with it, which no other program inherits."""
        descriptors = array("i")
        space = socket.CMSG_LEN(descriptors.itemsize)
        text, ancillary, _, _ = self._socket.recvmsg(_LONGEST, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        return text, list(descriptors)

    def _maps(self, part: dict[str, Any], descriptors: list[int]) -> bool:
        """Maps the buffer of a part, if it is a new one. What cannot be mapped is given back."""
        buffer = part["buffer"]
        try:
            if descriptors:
                mapping = mmap.mmap(descriptors[0], 0, access=mmap.ACCESS_READ)
                self.buffers[buffer] = mapping, LentMemory(mapping)
        except (OSError, ValueError):
            pass
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if buffer not in self.buffers:
            self.give_back(buffer)
            return False
        part["memory"] = Lent(self, buffer, part["offset"])
        return True

    def events(self) -> Iterator[Event]:
        """What happens, until the command says no more."""
        while (event := self._events.get()) is not None:
            yield event

    def give_back(self, buffer: int) -> None:
        """The command may use a buffer again."""
        # Where it has ended it has all back.
        with suppress(OSError):
            self._socket.send(struct.pack("=Q", buffer), socket.MSG_NOSIGNAL)

    def has_ended(self) -> None:
        """The command has. What it said can still be taken; then comes the end, even if a child that was
        forked has its socket."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """The command takes back what it lent."""
        self._socket.close()
        self.other_end.close()
