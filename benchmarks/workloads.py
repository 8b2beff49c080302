"""What the step benchmark trains: a model, random batches and a loss, from a seed, equal for every method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10
POOL = 4
"""Batches that are made in advance; steps take them in turn."""


class Workload:
    """One training (or evaluation) job.

    Attributes:
        trains: whether a step is a training step; otherwise one batch of evaluation.
        micro_batches: per step; the gradient is their mean.
    """

    trains = True
    micro_batches = 1

    def __init__(self, small: bool, device: str, seed: int = 0) -> None:
        self.small = small
        self.device = device
        self.seed = seed

    def make_model(self) -> nn.Module:
        """The model on the CPU, in float32."""
        raise NotImplementedError

    def make_batch(self) -> tuple[Tensor, Tensor]:
        """Input and target on the CPU."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        """The model of the seed, on the device."""
        torch.manual_seed(self.seed)
        return self.make_model().to(self.device)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """`POOL` batches of the seed, on the device."""
        torch.manual_seed(self.seed + 1)
        made = [self.make_batch() for _ in range(POOL)]
        return [(x.to(self.device), y.to(self.device)) for x, y in made]

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of the model's logits (batch, classes) for the labels (batch)."""
        return F.cross_entropy(model(x), y)


# --- Perceptrons ----------------------------------------------------------------------------------------


class Perceptron(Workload):
    """Linear layers of one width with GELU between, of (layers, width, batch)."""

    full = little = (4, 64, 32)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, width, batch."""
        return self.little if self.small else self.full

    def make_model(self) -> nn.Module:
        layers, width, _ = self.shape
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(width, width), nn.GELU()]
        return nn.Sequential(*parts, nn.Linear(width, CLASSES))

    def make_batch(self) -> tuple[Tensor, Tensor]:
        _, width, batch = self.shape
        return torch.randn(batch, width), torch.randint(CLASSES, (batch,))


class TinyPerceptron(Perceptron):
    """So small that only the cost of calls counts."""


class WidePerceptron(Perceptron):
    """Products and the update of many weights."""

    full, little = (3, 2048, 256), (3, 512, 64)


class Accumulation(Perceptron):
    """Small micro-batches: weights are cast, and gradients added, again and again."""

    full, little = (4, 1024, 16), (4, 256, 8)
    micro_batches = 8


class Evaluation(Perceptron):
    """Small batches without gradients: what casting the weights costs shows."""

    full, little = (4, 1024, 8), (4, 256, 8)
    trains = False


# --- Convolutions ---------------------------------------------------------------------------------------


def backbone(channels: Sequence[int]) -> nn.Sequential:
    """3x3 convolutions with batch norm, each after the first at half the side, and a mean over the image."""
    parts: list[nn.Module] = []
    before = 3
    for after in channels:
        stride = 1 if before == 3 else 2
        parts += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        before = after
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Convolutions(Workload):
    """A convolutional classifier of square images."""

    @property
    def channels(self) -> tuple[int, int, int]:
        """Of each convolution."""
        return (16, 32, 64) if self.small else (64, 128, 256)

    def make_model(self) -> nn.Module:
        return nn.Sequential(backbone(self.channels), nn.Linear(self.channels[-1], CLASSES))

    def make_batch(self) -> tuple[Tensor, Tensor]:
        batch, side = (16, 16) if self.small else (64, 32)
        return torch.randn(batch, 3, side, side), torch.randint(CLASSES, (batch,))


class Frozen(Convolutions):
    """A frozen backbone, its norms in evaluation, under a head that is trained."""

    def make_model(self) -> nn.Module:
        body = backbone(self.channels).eval().requires_grad_(False)
        width = self.channels[-1]
        return nn.Sequential(body, nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, CLASSES))


# --- Sequences ------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block with norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """A small GPT: 78 weights with 6 layers."""

    def __init__(self, width: int, layers: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, length) to logits (batch, length, vocabulary)."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))


class Gpt(Workload):
    """Next-token training of a small GPT."""

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Width, layers, heads, length, vocabulary."""
        return (96, 3, 3, 64, 512) if self.small else (384, 6, 6, 256, 4096)

    def make_model(self) -> nn.Module:
        return Transformer(*self.shape)

    def make_batch(self) -> tuple[Tensor, Tensor]:
        *_, length, vocabulary = self.shape
        text = torch.randint(vocabulary, (4 if self.small else 8, length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of two thin ones beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.narrow = nn.Linear(layer.in_features, rank, bias=False)
        self.widen = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return self.layer(x) + self.widen(self.narrow(x))


class Finetune(Gpt):
    """The GPT with adapters: all other weights are frozen, and gradients flow through them."""

    def make_model(self) -> nn.Module:
        model = super().make_model().requires_grad_(False)
        for block in model.blocks:
            for name in ("qkv", "out", "up", "down"):
                setattr(block, name, Adapted(getattr(block, name)))
        return model


class Recurrent(nn.Module):
    """Two LSTM layers and a classifier of their last output."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(inputs, width, 2, batch_first=True), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, inputs) to (batch, classes)."""
        return self.head(self.lstm(x)[0][:, -1])


class Lstm(Workload):
    """A recurrent classifier."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Inputs, width, batch, length."""
        return (16, 64, 8, 16) if self.small else (64, 256, 32, 64)

    def make_model(self) -> nn.Module:
        return Recurrent(*self.shape[:2])

    def make_batch(self) -> tuple[Tensor, Tensor]:
        inputs, _, batch, length = self.shape
        return torch.randn(batch, length, inputs), torch.randint(CLASSES, (batch,))


WORKLOADS: dict[str, type[Workload]] = {
    "tiny-mlp": TinyPerceptron,
    "wide-mlp": WidePerceptron,
    "accumulation": Accumulation,
    "cnn": Convolutions,
    "gpt": Gpt,
    "frozen": Frozen,
    "lstm": Lstm,
    "evaluation": Evaluation,
    "finetune": Finetune,
}
