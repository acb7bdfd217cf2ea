"""What to say of an error of torch: the line of the user's code, and what may be done about it."""

from __future__ import annotations

import traceback
from pathlib import Path

from fxshard.capture import provenance

# Files, functions and operators of torch that look at values -> what to do in place of it.
_STOCK = {
    "ctc_loss": "Return the log-probabilities, and compute ctc_loss outside of the model.",
    "pack_padded_sequence": "Feed padded sequences to the module, and mask what it gives.",
    "gaussian_nll_loss": "Write out what it computes: 0.5 * (var.log() + (input - target) ** 2 / "
    "var).mean(). Or compute it outside of the model.",
    "one_hot": "Give one_hot the number of classes: num_classes=...",
    "batchnorm.py": "Give the batch norm a number as its momentum: None makes it a Python number.",
    "aten.linalg_lstsq.default": "Compute torch.linalg.pinv(a) @ b: the shape of lstsq's residuals "
    "depends on the rank of a.",
}


def remedy(error: BaseException) -> str:
    """What the user can do about Python that looks at values; what fits where it is torch's own."""
    operator = _STOCK.get(str(getattr(error, "func", "")))
    if operator is not None:
        return operator
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        known = _STOCK.get(frame.name) or _STOCK.get(Path(frame.filename).name)
        if known is not None:
            return known
        if provenance.is_users(frame.filename):  # of what C++ computes there is no frame
            called = [text for name, text in _STOCK.items() if f"{name}(" in (frame.line or "")]
            if called:
                return called[0]
    return (
        "Make it a tensor operation (torch.where, masking), or compute it outside the model and "
        "pass it in."
    )


def line_of(error: BaseException) -> str:
    """``, at``, and the innermost frame of the user's code; or a stop."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None:
        chain.append(current)
        current = current.__cause__ or current.__context__
    for is_named in (provenance.is_users, provenance.has_no_file):
        for failure in reversed(chain):
            for frame in reversed(traceback.extract_tb(failure.__traceback__)):
                if is_named(frame.filename):
                    where = f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'
                    return f", at\n  {where}\n    {frame.line}"
    return "."
