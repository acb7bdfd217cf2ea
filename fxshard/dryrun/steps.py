"""Steps of a training loop that does not mark them, and the end of it."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from fxshard._torch.fully_sharded import replaced


class Enough(BaseException):
    """As many steps are over as were asked for.

    No `Exception`, as loops that go on after one (a batch size that is halved, a file that is
    missing) are to end too.
    """


class Steps:
    """A step is over where a forward begins after every optimizer has stepped, or one twice.

    So gradients may be accumulated over several forwards, optimizers may take turns, and what a
    loop does after the optimizer's step (``zero_grad``, the next batch) is in the step before.
    """

    def __init__(self, step: Callable[[], None], most: int) -> None:
        """Args:
        step: marks that a step is over.
        most: steps until `Enough` is raised.
        """
        self._step, self._left = step, most
        self._made: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: collections.Counter[int] = collections.Counter()

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        self._stepped[id(optimizer)] += 1

    def forward(self) -> None:
        """A forward begins.

        Raises:
            Enough: and no further one is asked for.
        """
        waited_for = {id(each) for each in self._made} - self._stepped.keys()
        if self._stepped and (not waited_for or max(self._stepped.values()) > 1):
            self._step()
        if self._left <= 0:
            raise Enough

    def marked(self) -> None:
        """A step was marked as over, here or by the loop itself."""
        self._stepped.clear()
        self._left -= 1

    def end(self) -> None:
        """Nothing follows: the step is over if an optimizer has stepped."""
        if self._stepped:
            self._step()

    @contextlib.contextmanager
    def optimizers_seen(self) -> Iterator[None]:
        """While the block runs, optimizers are known from when they are made."""
        plain = Optimizer.__init__

        @functools.wraps(plain)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            plain(optimizer, *args, **kwargs)
            self._made.add(optimizer)

        with replaced([(Optimizer, "__init__", init)]):
            yield
