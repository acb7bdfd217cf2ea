"""``python -m fxshard``: the command line."""

import sys

from fxshard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
