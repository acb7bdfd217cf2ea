"""``python -m examples.demo``: the demo from the command line."""

import argparse
import dataclasses
import sys

from examples.demo import main
from examples.demo.recipe import Settings
from fxshard.errors import FxshardError


def arguments(argv: list[str] | None = None) -> Settings:
    """The settings that a command line gives; every field of `Settings` is an option."""
    parser = argparse.ArgumentParser(
        "examples.demo",
        description="Plan a model, train it on several ranks, and prove every claim.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in dataclasses.fields(Settings):
        parser.add_argument(
            f"--{field.name}",
            type=type(field.default),
            default=field.default,
            help=field.metadata["help"],
        )
    return Settings(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    try:
        sys.exit(main.run(arguments()))
    except FxshardError as error:
        sys.exit(f"{type(error).__name__}: {error}")
