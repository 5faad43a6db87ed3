"""The exceptions of the package."""

import errno as codes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpunvme._native import Transfer


class Error(OSError):
    """An operation of gpunvme that failed. ``errno`` and ``filename`` are those of an ``OSError``.

    Where Python has a class for the errno, such as ``FileNotFoundError`` or ``PermissionError``, the
    exception is of that class too.
    """

    #: The code that says why a transfer or a registration was refused, such as ``no-vfio``; or None.
    reason: str | None
    #: Which of a list of pairs it is about, counted from 0; or None.
    segment: int | None
    #: What had been moved before the transfer failed; or None.
    moved: "Transfer | None"

    def __init__(
        self,
        errno: int,
        message: str,
        reason: str | None = None,
        segment: int | None = None,
        moved: "Transfer | None" = None,
    ) -> None:
        super().__init__(errno, message)
        self.reason = reason
        self.segment = segment
        self.moved = moved

    @property
    def route(self) -> str | None:
        """The route that the bytes took which had been moved, if they took one; or None."""
        routes = self.moved.routes if self.moved else {}
        return max(routes, key=lambda name: routes[name]) if routes else None

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> "tuple[object, ...]":
        # What was moved stays behind: it is told of in the process that moved it.
        return make, (self.errno, self.strerror, self.filename, self.reason, self.segment, None)


class OfParentError(Error, ChildProcessError):
    """A file or mount that the parent process opened; see :class:`Error`."""


class ExistsError(Error, FileExistsError):
    """A file that is there already; see :class:`Error`."""


class IsDirectoryError(Error, IsADirectoryError):
    """A directory in the place of a file; see :class:`Error`."""


class NotFoundError(Error, FileNotFoundError):
    """A file that is not there; see :class:`Error`."""


class NotDirectoryError(Error, NotADirectoryError):
    """A file in the place of a directory; see :class:`Error`."""


class NotPermittedError(Error, PermissionError):
    """What this process may not do; see :class:`Error`."""


_CLASSES: dict[int, type[Error]] = {
    codes.EACCES: NotPermittedError,
    codes.ECHILD: OfParentError,
    codes.EEXIST: ExistsError,
    codes.EISDIR: IsDirectoryError,
    codes.ENOENT: NotFoundError,
    codes.ENOTDIR: NotDirectoryError,
    codes.EPERM: NotPermittedError,
}
# As tracebacks name them, and programs.
for _class in (Error, *_CLASSES.values()):
    _class.__module__ = "gpunvme"


def make(
    errno: int,
    message: str,
    path: "str | os.PathLike[str] | None",
    reason: str | None,
    segment: int | None,
    moved: "Transfer | None",
) -> Error:
    """Makes the exception of an error of the native part."""
    error = _CLASSES.get(errno, Error)(errno, message, reason, segment, moved)
    if path is not None:
        error.filename = os.fspath(path)
    return error
