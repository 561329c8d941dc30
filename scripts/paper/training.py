"""Training by the schedules of the paper's appendix, with the trained weights kept in a cache
folder; loss and accuracy.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from vision_data import ImageData

_EVALUATION_BATCH = 100
seconds_of_training: list[float] = []  # of the networks that were not in the cache


@dataclass(frozen=True)
class Schedule:
    """How a network is trained. The defaults are the paper's for the fully connected networks on
    MNIST.

    Attributes:
        epochs: passes through the training images.
        optimizer: "adam", "adamw", or "sgd" with momentum 0.9.
        cosine: whether the learning rate rises linearly for `warmup` epochs and then falls as half
            a cosine.
        decay: factor on the learning rate after each epoch, without `cosine`.
        augment: whether images are mirrored and moved by up to 4 pixels at random.
    """

    epochs: int
    optimizer: str = "adam"
    rate: float = 1e-4
    weight_decay: float = 0.0
    cosine: bool = False
    warmup: float = 0.0
    decay: float = 1.0
    augment: bool = False
    batch_size: int = 128

    def rate_at(self, epoch: float) -> float:
        """The learning rate after a number of epochs, which may be a fraction."""
        if not self.cosine:
            return self.rate * self.decay ** int(epoch)
        if epoch < self.warmup:
            return self.rate * epoch / self.warmup
        return (
            self.rate
            / 2
            * (1 + math.cos(math.pi * (epoch - self.warmup) / (self.epochs - self.warmup)))
        )


class Measured(NamedTuple):
    """Accuracy and mean cross-entropy on the test images."""

    accuracy: float
    loss: float


def evaluate_on(model: nn.Module, data: ImageData) -> Measured:
    """Accuracy and loss of a network on the test images, in evaluation mode."""
    training = model.training
    right = 0
    loss = 0.0
    model.eval()
    with torch.no_grad():
        for images, labels in _batches(data.test, data.test_labels):
            logits = model(data.inputs(images))
            right += int((logits.argmax(1) == labels).sum())
            loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
    model.train(training)
    return Measured(right / len(data.test), loss / len(data.test))


def trained(
    build: Callable[[], nn.Module],
    name: str,
    data: ImageData,
    schedule: Schedule,
    seed: int,
    cache: Path,
) -> nn.Module:
    """A trained network in evaluation mode: from the cache, else trained now and put there.

    Args:
        build: makes the network, with random weights.
        name: of the network; part of the name of the cached file.
        seed: of the weights, the order of the images, and their changes.
        cache: the folder; a file's name has a digest of the schedule, the shapes and the images.
    """
    from safetensors.torch import load_file, save_file

    torch.manual_seed(seed)
    model = build()
    about = [
        {
            field.name: getattr(schedule, field.name)
            for field in fields(schedule)
            if getattr(schedule, field.name) != field.default
        },
        {key: list(value.shape) for key, value in model.state_dict().items()},
        [data.mean, data.std],
    ]
    digest = hashlib.sha256(json.dumps(about).encode() + data.train_labels.numpy().tobytes())
    digest.update(data.train[:100].numpy().tobytes())
    path = cache / f"{data.name}-{name}-{seed}-{digest.hexdigest()[:12]}.safetensors"
    if path.is_file():
        model.load_state_dict(load_file(path))
        return model.eval()
    _train(model, name, data, schedule, seed)
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, unfinished)
    unfinished.replace(path)
    return model.eval()


def _train(model: nn.Module, name: str, data: ImageData, schedule: Schedule, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer: torch.optim.Optimizer
    if schedule.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if schedule.optimizer == "adam" else torch.optim.AdamW
        optimizer = kind(
            model.parameters(), lr=schedule.rate, weight_decay=schedule.weight_decay, fused=True
        )
    else:
        optimizer = torch.optim.SGD(
            model.parameters(), lr=schedule.rate, momentum=0.9, weight_decay=schedule.weight_decay
        )
    device = _device()
    steps = math.ceil(len(data.train) / schedule.batch_size)
    start = time.perf_counter()
    model.to(device)
    if data.train.shape[1] == 3:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster convolutions on CPUs
    model.train()
    for epoch in range(schedule.epochs):
        total = 0.0
        for step, places in enumerate(
            torch.split(torch.randperm(len(data.train), generator=generator), schedule.batch_size)
        ):
            images = (
                _changed(data.train[places], generator) if schedule.augment else data.train[places]
            )
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate_at(epoch + step / steps)
            loss = functional.cross_entropy(
                model(data.inputs(images).to(device)), data.train_labels[places].to(device)
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach()) * len(places)
        told = f"{name}: epoch {epoch + 1} of {schedule.epochs}, loss {total / len(data.train):.4f}"
        print(f"{told}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    seconds_of_training.append(time.perf_counter() - start)
    model.cpu()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _changed(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images mirrored with probability 1/2 and moved by up to 4 pixels, with zeros at the
    border.
    """
    count, _, height, width = images.shape
    mirror = torch.rand(count, generator=generator) < 0.5
    images = torch.where(mirror.view(-1, 1, 1, 1), images.flip(3), images)
    padded = functional.pad(images, (4, 4, 4, 4))
    down, right = torch.randint(0, 9, (2, count, 1), generator=generator)
    rows = down + torch.arange(height)
    columns = right + torch.arange(width)
    return padded[
        torch.arange(count).view(-1, 1, 1, 1),
        torch.arange(images.shape[1]).view(1, -1, 1, 1),
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def _batches(images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(
        zip(
            torch.split(images, _EVALUATION_BATCH),
            torch.split(labels, _EVALUATION_BATCH),
            strict=True,
        )
    )
