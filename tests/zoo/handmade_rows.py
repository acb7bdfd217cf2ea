"""Hand-written models with their batches and losses: rows of the table of architectures."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import Batch, Case, cross_entropy, float_batch, output_loss, token_batch
from tests.zoo import handmade as hand
from tests.zoo import labelled_token_batch as labelled
from tests.zoo.architecture import LOOKS, Architecture
from tests.zoo.handmade import Stack


def graph_batch(rank: int, step: int) -> Batch:
    """Nodes f32 (6, 8) and the edges of a ring with a chord."""
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 3]])
    return (*float_batch(rank, step, shape=(6, 8))[0], edges), {}


def keyword_batch(rank: int, step: int) -> Batch:
    """Keywords of `handmade.Keywords`."""
    (x,), _ = float_batch(rank, step, shape=(6, 8))
    more = {"bias": torch.ones(8)}
    return (), {"x": x, "more": more, "mask": torch.eye(6, 8) > 0, "scale": 0.5}


def twice_loss(output: dict[str, Tensor]) -> Tensor:
    """Both heads."""
    return cross_entropy(output["near"]) + cross_entropy(output["far"])


def moe_loss(output: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy and a little of the balancing loss."""
    return cross_entropy(output[0]) + 0.01 * output[1].sum()


def loss_of_logits(output: dict[str, Any]) -> Tensor:
    """The loss of `handmade.Keywords`."""
    return cross_entropy(output["logits"])


ROWS = partial(float_batch, shape=(6, 8))
SEQUENCES = partial(float_batch, shape=(2, 5, 8))
WORDS = partial(token_batch, vocab=32, shape=(2, 5))
TWO_LAYERS: dict[str, Any] = dict(num_layers=2, dropout=0.1, batch_first=True)


def row(
    family: str,
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[[int, int], Batch] = ROWS,
    loss: Callable[[Any], Tensor] = cross_entropy,
    refused: str | None = None,
    **more: Any,
) -> Architecture:
    """A hand-written architecture."""
    return Architecture(family, Case(name, build, batch, loss), refused, **more)


def stacked(family: str, name: str, layer: Callable[[int], nn.Module], **more: Any) -> Architecture:
    """Two of `layer` between linear layers."""
    return row(family, name, partial(Stack, layer), **more)


NETS, PARAMETERS = "hand-written: networks", "hand-written: parameters"
AUTOGRAD, FORWARD = "hand-written: autograd and checkpoints", "hand-written: what forward does"
IMPOSSIBLE = "hand-written: what no trace can hold"
HANDMADE: tuple[Architecture, ...] = (
    row(NETS, "GRU layers on embeddings", hand.Recurrent, WORDS),
    row(
        NETS,
        "GRU, 2 layers, bidirectional, dropout",
        partial(hand.OneRnn, nn.GRU, **TWO_LAYERS, bidirectional=True),
        SEQUENCES,
    ),
    row(NETS, "LSTM", partial(hand.OneRnn, nn.LSTM), SEQUENCES),
    replace(
        # Eager with and without oneDNN's LSTM differ by 1.3e-6 here.
        row(
            NETS,
            "LSTM, 2 layers, bidirectional, dropout",
            partial(hand.OneRnn, nn.LSTM, **TWO_LAYERS, bidirectional=True),
            SEQUENCES,
        ),
        onednn=False,
    ),
    row(NETS, "RNN, 2 layers, dropout", partial(hand.OneRnn, nn.RNN, **TWO_LAYERS), SEQUENCES),
    row(NETS, "graph network, index_add and scatter_reduce", hand.GraphNet, graph_batch),
    row(NETS, "batched experts and their balance", hand.MixtureOfExperts, WORDS, moe_loss),
    row(NETS, "U-Net", hand.UNet, partial(float_batch, shape=(2, 3, 8, 8))),
    replace(
        # AdamW's temporary tensors in a step of complex parameters are not predicted: 528 bytes.
        stacked(NETS, "complex parameters and FFT", hand.Spectral),
        optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    ),
    stacked(PARAMETERS, "weight norm", hand.weight_normed),
    stacked(PARAMETERS, "spectral norm", hand.spectral_normed),
    stacked(PARAMETERS, "orthogonal weights", hand.orthogonal_weight),
    stacked(PARAMETERS, "a parameter without an element", hand.Empty),
    stacked(
        PARAMETERS,
        "a transposed parameter",
        hand.Transposed,
        refused=r"'layers\.0\.weight' is not contiguous .* Make it contiguous",
    ),
    stacked(PARAMETERS, "parameters in bf16, fp32 and fp64", hand.SeveralDtypes),
    stacked(PARAMETERS, "a parameter used under no_grad only", hand.Teacher),
    row(PARAMETERS, "LoRA on a frozen Llama", hand.lora, partial(labelled, vocab=128), output_loss),
    stacked(
        PARAMETERS,
        "a parameter without a dimension",
        hand.Scaled,
        refused=r"'layers\.0\.scale' is a scalar .* Make it a 1-D tensor",
    ),
    row(
        PARAMETERS,
        "sparse gradients of an embedding",
        hand.SparseEmbedding,
        WORDS,
        refused=r"gradient of 'table\.weight' is sparse.*sparse=False",
    ),
    stacked(AUTOGRAD, "custom autograd.Function", hand.Clipped),
    stacked(AUTOGRAD, "forward, pre- and full backward hooks", hand.hooked),
    stacked(AUTOGRAD, "hook on a value", hand.TensorHook),
    stacked(AUTOGRAD, "autocast inside of forward", hand.Autocast),
    stacked(AUTOGRAD, "checkpoint, reentrant", hand.reentrant),
    stacked(AUTOGRAD, "checkpoint, non-reentrant", hand.non_reentrant),
    stacked(AUTOGRAD, "checkpoint, selective", hand.selective),
    stacked(AUTOGRAD, "checkpoint within a checkpoint", hand.NestedCheckpoint),
    stacked(AUTOGRAD, "checkpoint_sequential", hand.CheckpointSequential),
    stacked(
        AUTOGRAD,
        "checkpoint_sequential, reentrant",
        partial(hand.CheckpointSequential, use_reentrant=True),
    ),
    stacked(FORWARD, "buffers written and replaced in forward", hand.Running),
    row(FORWARD, "control flow by shape", hand.ByShape),
    row(FORWARD, "nested dataclasses returned", hand.NestedOutput, loss=output_loss),
    row(FORWARD, "keyword-only tensors", hand.Keywords, keyword_batch, loss_of_logits),
    row(
        FORWARD,
        "layers called twice, two heads",
        hand.Twice,
        partial(float_batch, shape=(4, 13)),
        twice_loss,
    ),
    stacked(FORWARD, "masked select", hand.Selects, sized_by_data=True),
    stacked(FORWARD, "there and back through numpy", hand.ThroughNumpy),
    stacked(IMPOSSIBLE, "if on a value", hand.Branches, refused=LOOKS, line="if x.sum() > 0:"),
    stacked(IMPOSSIBLE, "loop over .item()", hand.Items, refused=LOOKS, line=".item()"),
    stacked(
        IMPOSSIBLE,
        "numpy's random numbers",
        hand.NumpyNoise,
        refused=r"forward of layers\.0 \(NumpyNoise\) draws from numpy\.random.*torch\.rand",
    ),
)
