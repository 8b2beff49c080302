"""MNIST (LeCun et al., 1998) through torchvision, which floatplan does not require."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from floatplan.errors import DataError
from floatplan.tasks.digits import ConvNet, adamw
from floatplan.tasks.images import Data, Examples, ImageRecipe
from floatplan.tasks.task import DataSource, cosine

DEFAULT_FOLDER = Path("data")
MEAN, DEVIATION = 0.1307, 0.3081  # of the training pixels, scaled to [0, 1]


def load(source: DataSource) -> Data:
    """Images as (N, 1, 32, 32), padded from 28x28, with mean 0 and variance 1 over the training split.

    Raises:
        DataError: no torchvision, or no MNIST in the folder and no leave to fetch it.
    """
    try:
        from torchvision.datasets import MNIST
    except (ImportError, RuntimeError) as error:  # a torchvision built for another torch raises either
        raise DataError(
            f"task mnist needs torchvision, which does not load here ({error}); install the torchvision "
            "that matches your torch, or use --task digits, which needs no download"
        ) from error
    folder = source.folder or DEFAULT_FOLDER
    try:
        return Data(
            *(_examples(MNIST(str(folder), train, download=source.download)) for train in (True, False))
        )
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"no MNIST that can be read in {folder} ({error}); add --download to fetch it there, "
            "name its folder with --data, or use --task digits"
        ) from error


def _examples(dataset: Any) -> Examples:
    pixels: Tensor = dataset.data.unsqueeze(1).float() / 255
    return Examples(
        F.pad((pixels - MEAN) / DEVIATION, (2, 2, 2, 2), value=-MEAN / DEVIATION), dataset.targets
    )


MNIST_RECIPE = ImageRecipe(
    name="mnist",
    description="70,000 handwritten digits at 32x32; three convolutions with batch norm; AdamW",
    load=load,
    make_model=ConvNet,
    loss=F.cross_entropy,
    make_optimizer=adamw,
    batch_size=128,
    epochs=3,
    schedule=cosine,
)
