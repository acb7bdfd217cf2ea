"""The passes, one per file; import them as ``fxshard.passes``.

This folder stands at the top of the repository, and ``fxshard/passes`` is a symlink to it, so that
a checkout has it on the path twice. Imported under the bare name ``passes`` every class in it would
exist a second time, and ``isinstance`` would tell the copies apart: that name is refused.
"""

if __name__ == "passes":
    raise ImportError(
        "the folder passes/ is the package fxshard.passes; write `import fxshard.passes`",
        name=__name__,
    )
