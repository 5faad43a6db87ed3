"""Files that appear under their name when they are whole."""

import errno
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
    is written to. Errors about it name ``path``.
    """
    if not path:  # which would be the current folder
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    real = os.path.realpath(path)
    folder = os.path.dirname(real)
    temporary = os.path.join(folder, f".gpunvme-{secrets.token_hex(8)}.tmp")
    try:
        # Before anything is written.
        mode = _mode(real)
        if path.endswith(os.sep) or (mode is not None and stat.S_ISDIR(mode)):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(temporary, flags, 0o600))
        try:
            yield temporary
            mode = _mode(real)
            os.chmod(temporary, 0o666 & ~_umask() if mode is None else stat.S_IMODE(mode))
            os.rename(temporary, real)
        except BaseException:
            # What failed is the error, and with a mount that is gone this fails as well.
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        if error.filename in (temporary, real):
            error.filename = path
            del error.filename2  # of a rename
        if isinstance(error.strerror, str):
            error.strerror = error.strerror.replace(temporary, path)
            error.args = (error.errno, error.strerror)
        raise
    # The name is durable with its folder.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mode(path: str) -> int | None:
    """What kind of file there is and who may do what with it; None where there is none."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _umask() -> int:
    """What new files are not allowed: of the process, which has no way to ask without setting it."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
