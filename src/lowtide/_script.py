"""A person's script, run as `python script args` would run it."""

import io
import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def execute(script: Path) -> None:
    """Run `script` as the module that is now `__main__`."""
    name = os.path.abspath(script)
    main = sys.modules["__main__"]
    main.__file__ = name
    with io.open_code(name) as file:
        code = compile(file.read(), name, "exec")
    exec(code, vars(main))  # noqa: S102 - running the person's own script is what this is for


@contextmanager
def as_main(script: Path, args: Sequence[str]) -> Iterator[None]:
    """What a script expects of `sys` when it is started by its name."""
    argv, path, main = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = [str(script), *args]
    sys.path[0:1] = [os.path.dirname(os.path.abspath(script))]
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        sys.argv = argv
        sys.path[:] = path
