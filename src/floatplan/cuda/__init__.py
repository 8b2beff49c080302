"""Holds `floatplan.cuda.amp`, the names of ``torch.cuda.amp``."""

from floatplan.cuda import amp

__all__ = ["amp"]
