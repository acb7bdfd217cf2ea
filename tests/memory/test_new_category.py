"""A category is one line of fxshard/memory/category.py: every view shows one that is new."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = '''
import pathlib, sys, types

# The module of categories with another line, in the place of fxshard's, before anything reads it.
path = pathlib.Path("fxshard/memory/category.py")
last = '    COMMUNICATION = "Communication Buffer"'
line = '    BETWEEN = "In Between", "Betw.", VALUES, "#123456", 12\\n'
text = path.read_text()
assert text.count(last) == 1
name = "fxshard.memory.category"
module = sys.modules[name] = types.ModuleType(name)
exec(compile(text.replace(last, line + last), str(path), "exec"), vars(module))

import fxshard
from fxshard.memory import liveness, regions
from fxshard.memory.views import html
from tests.memory.visible_cases import report

Category = module.Category

class Renamed:
    """Temporaries are of the new category."""

    def __getattr__(self, name):
        return getattr(Category, "BETWEEN" if name == "TEMP" else name)

    __getitem__ = __getattr__

liveness.Category = regions.Category = Renamed()
memory = report("hand")
assert memory.peak_by_category[Category.BETWEEN] > 0, memory.peak_by_category
assert "Betw." in memory.table(units="B", width=200)
assert "Betw." not in memory.table(units="B", width=50)  # where its group is one column
page = html.contents(memory)
assert {"name": "In Between", "color": "#123456"} in page["categories"]
assert memory.to_dict()["peak_by_category"]["In Between"] > 0
'''


def test_a_new_category_is_shown_by_every_view() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
