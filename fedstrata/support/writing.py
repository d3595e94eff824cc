"""Atomic writes: a file is complete or unchanged, even if its writer is killed; and additions to a file."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def write_atomically(file: Path, content: bytes, secret: bool = False) -> None:
    """Replace ``file`` by ``content`` atomically; the content is on disk on return.

    A secret is for the user alone.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(file)
    try:
        with open(temporary, "xb") as stream:  # made by `open`, so that its mode follows the umask
            if secret:
                os.chmod(temporary, 0o600)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if fcntl is not None:  # elsewhere a folder cannot be flushed
        handle = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(handle)  # the new name too
        finally:
            os.close(handle)


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder``, for the files that are to take its place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(folder)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary(path: Path) -> Path:
    return path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}"


def append(file: Path, content: bytes) -> None:
    """Add ``content`` at the end of ``file``, all of it or nothing."""
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        before = os.fstat(handle).st_size
        try:
            while content:
                content = content[os.write(handle, content) :]  # it may write less than it is given
        except BaseException:
            os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


def clear_strays(folder: Path, name: str = "*") -> None:
    """Remove temporary files of killed writers, for one file or for all in a folder."""
    for stray in folder.glob(f".{name}.*"):
        *_, pid, _ = ("", *stray.name.split("."))
        if not (pid.isdigit() and alive(int(pid))):
            with contextlib.suppress(OSError):
                stray.unlink()


def alive(pid: int) -> bool:
    """Whether a process with this number exists."""
    if pid == os.getpid():  # another thread may be writing
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


@contextlib.contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Lock a folder for this process; the lock is released when the process ends, however it ends.

    Raises:
        BlockingIOError: if another process holds it; ``what`` says what that process is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "ab") as stream:
        try:
            if fcntl is not None:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BlockingIOError(f"{what} is already running and uses {folder}.") from None
        yield
