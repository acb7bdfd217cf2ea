"""The dtypes that parts of a model compute and reduce in."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from fxshard._torch import fsdp1
from fxshard._torch.modules import REDUCES_AS_STORED
from fxshard.errors import ConfigError

# Fields of MixedPrecisionPolicy that mean something here; what to do instead of newer ones.
_POLICY = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
_NEWER = {
    "param_dtype_override_fn": "Give a dict from module classes or FQN globs to policies: each "
    "module it names is a unit.",
    "grad_dtype": "Leave it out: gradients are made in param_dtype, reduced in reduce_dtype, and "
    "have the dtype of their parameters.",
}


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of one unit; what torch's two policy classes say, in one form.

    Attributes:
        param_dtype: of unsharded parameters, and so of the gather and of compute; None: as stored.
        reduce_dtype: in which gradients are reduced; None: that of the unsharded gradient.
        output_dtype: to which floating outputs of the module are cast; None: not at all.
        buffer_dtype: to which floating buffers are cast when the model is sharded; None: not. With
            ``full_precision_in_eval`` they are cast back for calls in eval mode, and again after.
        cast_inputs: cast floating inputs of the module to `param_dtype`.
        cast_root_inputs: the same for the root module.
        keep_low_precision_grads: ``.grad`` stays in the dtype in which it was reduced.
        full_precision_classes: modules of these classes compute in fp32 all the same.
        reduce_as_stored: where `reduce_dtype` is None, gradients are reduced in the dtype of the
            sharded parameters: what a `MixedPrecisionPolicy` says since torch 2.15
            (torch/distributed/fsdp/_fully_shard/_fsdp_api.py).
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    cast_root_inputs: bool = True
    keep_low_precision_grads: bool = False
    full_precision_classes: tuple[type, ...] = ()
    reduce_as_stored: bool = False

    def computes_in(self, stored: torch.dtype) -> torch.dtype:
        """The dtype of an unsharded parameter that is stored in another: floating ones are cast."""
        wanted = self.param_dtype
        return wanted if wanted is not None and stored.is_floating_point else stored

    def reduces_in(self, made: torch.dtype) -> torch.dtype:
        """The dtype in which gradients made in another are reduced: floating ones are cast."""
        wanted = self.reduce_dtype
        return wanted if wanted is not None and made.is_floating_point else made

    @classmethod
    def of(cls, policy: Any) -> Precision:
        """From torch's `MixedPrecisionPolicy` or `MixedPrecision`.

        Raises:
            ConfigError: it is neither, or sets a field that newer torches have.
        """
        if isinstance(policy, Precision):
            return policy
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            dtype = getattr(policy, name, None)
            legal = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if isinstance(policy, (MixedPrecisionPolicy, MixedPrecision)) and not (
                dtype is None or legal
            ):
                raise ConfigError(
                    f"mixed_precision: {name}={dtype!r}: expected a floating torch.dtype, such as "
                    f"torch.bfloat16, or None."
                )
        if isinstance(policy, MixedPrecisionPolicy):
            for field in dataclasses.fields(policy):  # newer torches have more of them
                if field.name not in _POLICY and getattr(policy, field.name) != field.default:
                    instead = _NEWER.get(field.name, "Leave it out.")
                    raise ConfigError(f"mixed_precision: {field.name} is not supported. {instead}")
            return cls(
                **_said_by_both(policy),
                output_dtype=policy.output_dtype,
                cast_root_inputs=policy.cast_forward_inputs,
                reduce_as_stored=REDUCES_AS_STORED and policy.param_dtype is not None,
            )
        if isinstance(policy, MixedPrecision):
            return cls(
                **_said_by_both(policy),
                buffer_dtype=policy.buffer_dtype,
                cast_root_inputs=policy.cast_root_forward_inputs,
                keep_low_precision_grads=policy.keep_low_precision_grads,
                full_precision_classes=fsdp1.full_precision_classes(policy),
            )
        raise ConfigError(
            f"mixed_precision={policy!r}: expected torch.distributed.fsdp.MixedPrecisionPolicy or "
            f"MixedPrecision, or a dict from module classes or FQN globs to such policies."
        )


def _said_by_both(policy: MixedPrecisionPolicy | MixedPrecision) -> dict[str, Any]:
    """Our names of what torch's two classes both say."""
    return {
        "param_dtype": policy.param_dtype,
        "reduce_dtype": policy.reduce_dtype,
        "cast_inputs": policy.cast_forward_inputs,
    }
