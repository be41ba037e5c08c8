"""Automatic mixed precision: an operation runs in one dtype throughout."""

from __future__ import annotations

import torch

from magep_fast.spaces import WeightFeatures


def autocast_dtype(features: WeightFeatures) -> torch.dtype | None:
    """The dtype that an active autocast asks for, or None; as in torch, float64 is left alone."""
    device = features.device.type
    # "meta" has none. torch.amp.is_autocast_available knows, but torch 2.10 cannot compile a call of it.
    if device == "meta" or not torch.is_autocast_enabled(device) or features.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)
