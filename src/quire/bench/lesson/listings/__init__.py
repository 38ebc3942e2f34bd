"""The listings of the lesson: those of `bench.listings`, and a module each here, whose `main` prints.

`outputs.toml` has what each must print.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from quire.bench.listings import LISTINGS as WORKED
from quire.learn.lesson_listings import LessonListing

_HERE = Path(__file__).parent
_WORKED = {one.name: one for one in WORKED}


def _listing(name: str, output: str) -> LessonListing:
    if name in _WORKED:
        one = _WORKED[name]
        return LessonListing(
            name=name, about=one.about, source=one.source(), output=output, main=lambda: one.run
        )
    module = f"{name.replace('-', '_')}_listing"
    source = (_HERE / f"{module}.py").read_text(encoding="utf-8")
    about = ast.get_docstring(ast.parse(source)) or ""

    def main() -> Callable[[], None]:
        found: Callable[[], None] = import_module(f"{__name__}.{module}").main
        return found

    return LessonListing(name=name, about=about.splitlines()[0], source=source, output=output, main=main)


LISTINGS = tuple(
    _listing(name, output)
    for name, output in tomllib.loads((_HERE / "outputs.toml").read_text(encoding="utf-8")).items()
)
