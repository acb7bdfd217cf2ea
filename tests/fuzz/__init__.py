"""Random programs beside eager PyTorch: `python -m tests.fuzz SEED` replays one.

draft.py, operators.py  a module drawn line by line: each line has run in eager before it is kept
case.py                 a case is a seed: program, options, world, loop; written as stand-alone code
options.py              options of fxshard at random
train.py                the loop that both sides run, and what it sees
reference.py            eager PyTorch on every rank's batch, in the model's dtypes and in float64
judge.py                a case's class: right, refused, wrong, crash, bytes
shrink.py               a smaller case of the same class
changes.py              programs that change something between calls; change_parts.py: what they
                        are made of
__main__.py             many cases, and the table of what came out
"""
