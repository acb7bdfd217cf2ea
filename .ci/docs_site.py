"""What mkdocs calls when it builds the site: pages that lie outside of docs/, and links to them.

It warns of what the reference shows without a docstring, and a warning ends the build.

On the site, docs/ is the top folder. Files from elsewhere in the repository keep their paths, and
README.md becomes the first page.
"""

import inspect
import logging
import os
import pydoc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("README.md", "examples/README.md", "examples/*.py", "benchmarks/results/tune_*.png")


def on_pre_build(**_: Any) -> None:
    sys.path.insert(0, str(ROOT))  # docstrings are those of this checkout


def on_files(files: Files, config: Any) -> Files:
    for path in (path for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern))):
        files.append(File.generated(config, _place(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository become links between pages."""
    for name in re.findall(r"^::: (\S+)$", markdown, re.M):
        for missing in undocumented(name, pydoc.locate(name)):
            logging.getLogger("mkdocs.hooks").warning("%s has no docstring", missing)
    source = Path(page.file.abs_src_path)

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link["path"]).resolve()
        if target.is_dir():
            target /= "README.md"
        if not target.is_file():
            return link[0]  # an address, or broken: mkdocs says so
        here = os.path.dirname(_place(source))
        return f"]({os.path.relpath(_place(target), here or '.')}{link['rest'] or ''})"

    return re.sub(r"\]\((?P<path>[^)#\s:]+)(?P<rest>#[^)]*)?\)", moved, markdown)


def undocumented(name: str, value: Any) -> Iterator[str]:
    """What the reference shows of a public name and has no docstring: itself, or a member."""
    if not inspect.isclass(value):
        if not inspect.getdoc(value):
            yield name
        return
    said = vars(value).get("__doc__") or ""
    if not said or said.startswith(f"{value.__name__}("):  # a dataclass writes that one itself
        yield name
    for kind in value.__mro__:
        if kind.__module__.startswith("fxshard."):
            for own, member in vars(kind).items():
                code = hasattr(member, "__get__")  # a method or a property, and no default
                if code and not own.startswith("_") and not inspect.getdoc(member):
                    yield f"{name}.{own}"


def _place(path: Path) -> str:
    """The path of a file on the site."""
    inside = path.relative_to(ROOT).as_posix().removeprefix("docs/")
    return "index.md" if inside == "README.md" else inside
