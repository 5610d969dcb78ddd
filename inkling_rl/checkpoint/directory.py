"""A directory that appears whole or not at all.

It is built under a hidden name beside its own and renamed at the end. The builder holds a lock on the hidden directory;
the kernel drops the lock when the process ends, however it ends, and so a later builder of the same name knows which
hidden directories nobody works on and removes them. Two builders of one name do not disturb each other: the first to
finish gets the name, the other is refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inkling_rl.checkpoint.layout import CheckpointError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@contextmanager
def new_directory(path: Path, num_bytes: int = 0) -> Iterator[Path]:
    """Gives the directory to fill; it becomes `path` at the end of the block, on the disk, or vanishes with an error.

    Args:
        path: does not exist yet, or is an empty directory.
        num_bytes: what the block will write, checked against the free space beforehand.

    Raises:
        CheckpointError: `path` is in use, or the disk has no room, before or while writing.
    """
    path = path.absolute()
    refuse_used(path)
    with _parents(path):
        remove_abandoned(path)
        free = shutil.disk_usage(path.parent).free
        if num_bytes > free:
            raise CheckpointError(
                f"{path} must be on a disk with {num_bytes / 1e9:.3f} GB free; got {free / 1e9:.3f} GB. "
                "Free some or choose another directory"
            )
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY)
        try:
            _try_lock(lock)
            yield partial
            _sync(partial)
            refuse_used(path)
            os.replace(partial, path)
            _sync_entry(path.parent)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in _FULL:
                raise CheckpointError(
                    f"{path} must be on a disk with room for it; the disk is full. Free some or take another"
                ) from error
            if isinstance(error, OSError):
                if error.errno in _TAKEN:
                    refuse_used(path)
                error.filename = error.filename or str(path)  # writing to an open file names none
            raise
        finally:
            os.close(lock)


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """The directories above `path` for the block; an error takes away those that were made for it."""
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in missing:
            with suppress(OSError):  # somebody else uses it by now
                parent.rmdir()
        raise


def remove_abandoned(path: Path) -> None:
    """Removes what killed builders of `path` left behind."""
    for partial in path.parent.glob(f".{_escaped(path.name)}.partial-*"):
        try:
            lock = os.open(partial, os.O_RDONLY)
        except OSError:  # another builder has just removed or renamed it
            continue
        try:
            if _try_lock(lock):
                shutil.rmtree(partial, ignore_errors=True)
        finally:
            os.close(lock)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by a living builder, or a file system without locks on directories: leave it alone
        return False
    return True


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def refuse_used(path: Path) -> None:
    """Refuses a directory that exists and is not empty; `new_directory` does so by itself.

    Raises:
        CheckpointError: it is in use.
    """
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise CheckpointError(f"{path} must not exist or be an empty directory; it is in use. Choose another directory")


def _sync(directory: Path) -> None:
    """Bring the files to the disk before the directory gets its name, so that a power cut leaves no half checkpoint."""
    for path in [*directory.iterdir(), directory]:
        _sync_entry(path)


def _sync_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
