"""Files that appear under their name when they are whole."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["replaced"]


@contextmanager
def replaced(path: str) -> Iterator[str]:
    """Gives the path of a new, empty file beside ``path``, which takes its place, durably, when the block
    ends, and which is gone where the block raises.

    A file that is there keeps its mode; until then the new one is the user's own. Of a symbolic link the
    target is replaced. The new file's name cannot be guessed, so nothing that another user put in the folder
    is written to.
    """
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, f".gpunvme-{secrets.token_hex(8)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        yield temporary
        try:
            mode = stat.S_IMODE(os.stat(path).st_mode)
        except FileNotFoundError:
            mode = 0o666 & ~_umask()
        os.chmod(temporary, mode)
        os.rename(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    # The name is durable with its folder.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """What new files are not allowed: of the process, which has no way to ask without setting it."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
