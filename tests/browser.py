"""The browser that opens pages: Chromium of the system, which no package index has."""

import os
import shutil

REQUIRED = "REQUIRE_CHROMIUM"  # set: its absence is an error


def executable() -> str | None:
    """Where Chromium is, if it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def is_required() -> bool:
    return bool(os.environ.get(REQUIRED))
