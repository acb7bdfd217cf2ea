"""What mkdocs calls when it builds the site: pages that lie outside of docs/, and links to them.

On the site, docs/ is the top folder. Files from elsewhere in the repository keep their paths, and
README.md becomes the first page.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("README.md", "examples/README.md", "examples/*.py", "benchmarks/results/tune_*.png")


def on_files(files: Files, config: Any) -> Files:
    for path in (path for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern))):
        files.append(File.generated(config, _place(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository become links between pages."""
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


def _place(path: Path) -> str:
    """The path of a file on the site."""
    inside = path.relative_to(ROOT).as_posix().removeprefix("docs/")
    return "index.md" if inside == "README.md" else inside
