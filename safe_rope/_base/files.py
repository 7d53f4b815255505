"""Writes a file so that everybody sees either the old content or the new, whatever happens in between."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile


def write_atomically(path: str, data: bytes, *, expected: bytes | None = None) -> None:
    """Replace a file's content in one step; its mode stays, and a symbolic link stays one.

    With `expected`, the file must still hold just that. What is no regular file (a device, a pipe) is written
    to and not replaced.

    Raises:
        OSError: it cannot be written, or somebody else changed it meanwhile.
    """
    target = os.path.realpath(path)
    try:
        found = os.stat(target).st_mode
    except FileNotFoundError:
        mode = 0o666 & ~_umask()
        if not os.path.isdir(os.path.dirname(target)):
            raise FileNotFoundError(
                f"{path}: not written, there is no folder {os.path.dirname(target)}"
            ) from None
    else:
        if not (stat.S_ISREG(found) or stat.S_ISDIR(found)):
            with open(path, "wb", buffering=0) as device:
                device.write(data)
            return
        mode = stat.S_IMODE(found)
        if not os.access(target, os.W_OK):
            raise PermissionError(f"{path}: the file is write-protected")
    handle, temporary = tempfile.mkstemp(prefix=".safe-rope-", dir=os.path.dirname(target))
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        if expected is not None:
            with open(target, "rb") as file:
                if file.read() != expected:
                    raise OSError(f"{path}: changed by somebody else meanwhile, not written")
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
