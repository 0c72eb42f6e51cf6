"""Native code into the wheel: layout search and planner compiled, what needs torch as sources.

Without a compiler the wheel is pure Python. The allocator and the gate are built against the torch
that is installed, when they are first used. An editable install needs nothing from here.
"""

import importlib.util
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parents[1]


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Adds native code to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, or say why not and go on."""
        if version == "editable":
            return
        for path in sorted((ROOT / "native").rglob("*.[ch]*")):
            place = path.relative_to(ROOT / "native")
            if place.parts[0] in ("layout", "remake") or {"fuzz", "pretend"} & set(place.parts):
                continue
            build_data["force_include"][str(path)] = f"lowtide/_native_sources/{place}"
        native = _load(ROOT / "src" / "lowtide" / "_native.py")
        self._folder = tempfile.TemporaryDirectory()
        for recipe, place in ((native.LAYOUT, "_layout"), (native.REMAKE, "_policy")):
            library = Path(self._folder.name) / f"{recipe.name}.so"
            try:
                native.build(recipe, library)
            except native.NoNative as error:
                self.app.display_warning(f"lowtide is built without {recipe.what}: {error}")
                continue
            build_data["force_include"][str(library)] = f"lowtide/{place}/{library.name}"
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


def _load(path: Path) -> Any:
    """The module by its file: the package itself needs more than a build has."""
    spec = importlib.util.spec_from_file_location("native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["native"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
