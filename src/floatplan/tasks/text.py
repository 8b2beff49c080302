"""A small GPT on bytes of text: of a folder, or of Python's own standard library, which every machine has."""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from floatplan.errors import DataError
from floatplan.tasks.task import DataSource, Ingredients, Task, cosine

BYTES = 256
CONTEXT = 64
"""Bytes that a prediction may look back on."""
WIDTH, HEADS, BLOCKS = 64, 4, 2
WINDOWS_PER_EPOCH = 2048
HELD_OUT_WINDOWS = 128
HELD_OUT_SHARE = 0.1
STANDARD_LIBRARY_BYTES = 2 * 2**20
MOST_BYTES = 64 * 2**20
"""Read of a folder; what comes after is left out."""


class Block(nn.Module):
    """(N, T, WIDTH) to the same: causal attention, then a perceptron, each after a norm (pre-norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Adds to the residual stream."""
        qkv: Tensor = self.qkv(self.attention_norm(x))
        q, k, v = qkv.view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        hidden: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + hidden


class ByteGPT(nn.Module):
    """Bytes (N, T), int64, T up to `CONTEXT`, to logits of the next one (N, T, 256).

    As GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019): learned positions,
    the head shares its weight with the embedding, weights that write into the residual stream are drawn
    smaller by the root of how many do. The deviation of the others, there 0.02, fits this width.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                writers = 2 * BLOCKS if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(parameter, std=0.1 / math.sqrt(writers))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits, not normalised."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        states: Tensor = self.blocks(self.embedding(inputs) + self.position(places))
        logits: Tensor = self.head(self.norm(states))
        return logits


class Windows:
    """Batches of windows of a text that lies on the device, drawn anew in each pass.

    Args:
        text: (bytes,) uint8, longer than `CONTEXT`.
        batch_size: windows in a batch.
        seed: of what is drawn.
    """

    def __init__(self, text: Tensor, batch_size: int, seed: int) -> None:
        self._text, self.batch_size = text, batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return math.ceil(WINDOWS_PER_EPOCH / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets), both (batch size, `CONTEXT`) int64, targets one byte on."""
        starts = torch.randint(len(self._text) - CONTEXT, (WINDOWS_PER_EPOCH,), generator=self.generator)
        return pairs(self._text, starts, self.batch_size)

    def samples(self) -> list[tuple[Tensor, Tensor]]:
        """A batch of each size, from the beginning of the text; draws nothing."""
        last_size = (WINDOWS_PER_EPOCH - 1) % self.batch_size + 1
        sizes = (min(self.batch_size, WINDOWS_PER_EPOCH), last_size)
        return [
            next(pairs(self._text, torch.zeros(size, dtype=torch.int64), size))
            for size in dict.fromkeys(sizes)
        ]


def pairs(text: Tensor, starts: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows that begin at ``starts``, so many in a batch: (inputs, targets) as of `Windows`."""
    for some in torch.split(starts, size):
        places = some.unsqueeze(1) + torch.arange(CONTEXT + 1)
        windows = text[places.to(text.device)].long()
        yield windows[:, :-1], windows[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of the next byte, in nats, the mean over all of them."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019)."""
    return torch.optim.AdamW(parameters, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)


@dataclass(frozen=True)
class TextRecipe:
    """The task ``text``. Its ``evaluate`` is the share of held-out bytes that are predicted.

    Attributes:
        name: what the command line calls it.
        batch_size: windows per step unless told otherwise.
        epochs: passes over `WINDOWS_PER_EPOCH` windows unless told otherwise.
        schedule: share of training done, in [0, 1), to the factor on the learning rate.
    """

    name: str = "text"
    batch_size: int = 16
    epochs: int = 2
    schedule: Callable[[float], float] = cosine

    def prepare(self, given: Ingredients) -> Callable[[], Task]:
        """Read the text and move it to the device; what is returned makes the network.

        Raises:
            DataError: text that cannot be read, or too little.
        """
        text = read_text(given.source)
        cut = int(len(text) * (1 - HELD_OUT_SHARE))
        if len(text) - cut < CONTEXT + 1:
            least = math.ceil((CONTEXT + 1) / HELD_OUT_SHARE)
            raise DataError(
                f"{_source_of(given.source)} holds {len(text):,} bytes of text; the task text needs "
                f"{least:,}; name another folder with --data"
            )
        train, held_out = (part.to(given.device) for part in (text[:cut], text[cut:]))
        size = given.batch_size or self.batch_size
        windows = Windows(train, size, given.seed)
        starts = torch.linspace(0, len(held_out) - CONTEXT - 1, HELD_OUT_WINDOWS).long()

        def evaluate(model: nn.Module) -> float:
            right = [
                (model(inputs).argmax(-1) == next_).sum() for inputs, next_ in pairs(held_out, starts, size)
            ]
            return int(torch.stack(right).sum()) / (HELD_OUT_WINDOWS * CONTEXT)

        return lambda: Task(ByteGPT(), windows, loss, adamw, evaluate, self.epochs, self.schedule)

    def describe(self) -> str:
        """Data, network and optimizer in a sentence."""
        return "Text byte by byte, Python's standard library by default; a GPT of two blocks; AdamW"


TEXT = TextRecipe()


def read_text(source: DataSource) -> Tensor:
    """The text of a folder, or of modules of Python's standard library: (bytes,) uint8, the same each time.

    Files of a folder and those below it in the order of their paths, without hidden ones and those with
    a zero byte, which no text has; `MOST_BYTES` at most.

    Raises:
        DataError: a folder or a file that cannot be read.
    """
    folder = _source_of(source)
    try:
        if source.folder is None:
            found = sorted(folder.glob("*.py"))
            return _joined(found, STANDARD_LIBRARY_BYTES)
        if not folder.is_dir():
            raise DataError(f"data folder {folder} does not exist; name one that holds text files")
        return _joined(sorted(_visible_files(folder)), MOST_BYTES)
    except OSError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"cannot read {error.filename}: {error.strerror}; name another folder with --data"
        ) from error


def _source_of(source: DataSource) -> Path:
    return source.folder or Path(sysconfig.get_paths()["stdlib"])


def _visible_files(folder: Path) -> Iterator[Path]:
    def give_up(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=give_up):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _joined(paths: Iterable[Path], most: int) -> Tensor:
    text = bytearray()
    for path in paths:
        if not path.is_file() or len(text) >= most:
            continue
        with path.open("rb") as file:
            content = file.read(most - len(text))
        if b"\0" not in content:
            text += content
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
