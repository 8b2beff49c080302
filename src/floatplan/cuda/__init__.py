"""Holds `floatplan.cuda.amp`, the names of ``torch.cuda.amp``."""
