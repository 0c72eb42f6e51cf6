"""Writing a file all at once or not at all."""

import os
import tempfile
from pathlib import Path

from lowtide._errors import BadInput


def check_writable(path: Path, *, force: bool) -> None:
    """Refuse now what could not be written later: an existing file, a missing folder."""
    try:
        if path.exists() and not path.is_file():
            raise BadInput(f"{path} is not a file: name a file to write")
        if path.exists() and not force:
            raise BadInput(f"{path} exists: choose another name or add --force to replace it")
        if not path.absolute().parent.is_dir():
            raise BadInput(f"{path.parent} is not a folder: create it first")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content`; a crash on the way leaves the old file as it was."""
    try:
        handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(
                name, 0o666 & ~umask
            )  # mkstemp makes it private; a trace is shared like any file
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from error


def read_whole(path: Path) -> bytes:
    """The file's bytes, or one line that says why not."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
