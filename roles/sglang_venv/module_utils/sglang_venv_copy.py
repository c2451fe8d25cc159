# SPDX-License-Identifier: Apache-2.0
"""A copy of one file that shares nothing with its source but, where the file system can, the blocks on disk. Linux only."""

from __future__ import annotations

import errno
import os
import shutil

__all__ = ["copy_file"]

_CANNOT = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def copy_file(source: str, target: str) -> None:
    """Copies content and mode to a path that must not exist; a link is followed. Everybody may read the copy, only its owner
    write it. OSError as the system gave it."""
    with open(source, "rb") as reader, open(target, "xb") as writer:
        if not _in_kernel(reader.fileno(), writer.fileno()):
            shutil.copyfileobj(reader, writer, 1 << 20)
        os.fchmod(writer.fileno(), os.fstat(reader.fileno()).st_mode & 0o755 | 0o444)


def _in_kernel(reader: int, writer: int) -> bool:
    """Copies as a whole by the kernel, which shares blocks where it can; False if it can't between these two, nothing written."""
    done = 0
    size = os.fstat(reader).st_size
    while done < size:
        try:
            count = os.copy_file_range(reader, writer, size - done)
        except OSError as error:
            if done == 0 and error.errno in _CANNOT:
                return False
            raise
        if count == 0:  # some file systems say so of files that do have content
            if done:
                raise OSError(errno.EIO, f"the file became shorter while it was copied: {done} of {size} bytes")
            return False
        done += count
    return True
