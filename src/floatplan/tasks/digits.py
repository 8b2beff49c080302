"""scikit-learn's handwritten digits: 1,797 real 8x8 images (Alpaydin and Kaynak, 1998), no download."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from floatplan.tasks.images import Data, Examples, ImageRecipe
from floatplan.tasks.task import DataSource, constant, cosine

SPLIT_SEED = 0
TEST_SHARE = 0.2


def load_small(source: DataSource) -> Data:
    """Flattened 8x8 images, (N, 64), in [0, 1]; the same stratified split each time."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.tensor(digits.data / digits.data.max(), dtype=torch.float32)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(
        range(len(labels)), test_size=TEST_SHARE, stratify=digits.target, random_state=SPLIT_SEED
    )
    return Data(Examples(images[train], labels[train]), Examples(images[test], labels[test]))


def load_large(source: DataSource) -> Data:
    """The same images and split as (N, 1, 32, 32), with mean 0 and variance 1 over the training split."""
    small = load_small(source)
    train, test = _enlarged(small.train.inputs), _enlarged(small.test.inputs)
    mean, deviation = train.mean(), train.std()
    return Data(
        Examples((train - mean) / deviation, small.train.labels),
        Examples((test - mean) / deviation, small.test.labels),
    )


def _enlarged(flat: Tensor) -> Tensor:
    return F.interpolate(flat.view(-1, 1, 8, 8), size=(32, 32), mode="bilinear", align_corners=False)


class ConvNet(nn.Sequential):
    """(N, 1, H, W) to (N, 10): three 3x3 convolutions with batch norm, the two largest 64 to 128 to 128.

    Wide enough that hardware for low-precision products shows in the time of an epoch; small enough for a
    CPU without it. The maximum over all positions makes it fit any image size.
    """

    def __init__(self) -> None:
        super().__init__(
            *_block(1, 64, stride=2),
            *_block(64, 128, stride=2),
            *_block(128, 128, stride=1),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )


def _block(channels_in: int, channels_out: int, *, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(channels_out), nn.ReLU()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019) with torch's default decay."""
    return torch.optim.AdamW(parameters, lr=5e-3)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _linear() -> nn.Module:
    return nn.Linear(64, 10)


DIGITS = ImageRecipe(
    name="digits",
    description="1,797 handwritten digits at 32x32; three convolutions with batch norm; AdamW",
    load=load_large,
    make_model=ConvNet,
    loss=F.cross_entropy,
    make_optimizer=adamw,
    batch_size=64,
    epochs=6,
    schedule=cosine,
)

DIGITS_LINEAR = ImageRecipe(
    name="digits-linear",
    description="1,797 handwritten digits at 8x8; one linear layer; SGD",
    load=load_small,
    make_model=_linear,
    loss=F.cross_entropy,
    make_optimizer=_sgd,
    batch_size=64,
    epochs=5,
    schedule=constant,
)
