"""What the type checkers of users see of fxshard."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEAST = 0.98  # of all symbols of all modules that have no underscore have a known type


@pytest.mark.slow
def test_the_types_of_public_names_are_known() -> None:
    """pyright finds torch beside the first `python` of PATH; else all that is made of it counts."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    argv = [sys.executable, "-m", "pyright", "--verifytypes", "fxshard", "--ignoreexternal"]
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*argv, "--outputjson"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    told = json.loads(done.stdout)["typeCompleteness"]
    unknown = [each["name"] for each in told["symbols"] if not each["isTypeKnown"]]
    assert not [name for name in unknown if name.count(".") == 1], "names of the face"
    assert told["completenessScore"] >= LEAST, f"{told['completenessScore']:.1%}: {unknown}"
