"""A row of the table of architectures."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tests.zoo import Case

LOOKS = "depends on the values of a tensor"  # what refusals of many models say
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        family: heading that it stands under in docs/models.md.
        case: the model and its data; its units are those that fxshard finds by itself.
        refused: a regular expression that the error matches, for what fxshard does not take.
        line: for a refusal, what the line of code holds that the error must show.
        sized_by_data: a size in it depends on the data, so that bytes are not known.
        onednn: eager may take oneDNN's fused kernels, where it has them and programs have not.
        optimizer: whose steps are predicted and measured.
    """

    family: str
    case: Case
    refused: str | None = None
    line: str = ""
    onednn: bool = True
    sized_by_data: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
