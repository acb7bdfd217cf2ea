"""The backend of torch.compile."""

from fxshard.dynamo.graphs import backend

__all__ = ["backend"]
