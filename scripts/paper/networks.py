"""The networks of the paper, written for images of 28, 32 or 64 pixels, and the given weights of
ResNets for CIFAR-10.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional

from emp_llm.common.errors import UserError

FC_WIDTHS = {
    "fc2": (100, 10),
    "fc5": (1000, 600, 300, 100, 10),
    "fc12": (1000, 900, 800, 750, 700, 650, 600, 500, 400, 200, 100, 10),
}
# 0: pooling.
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


def fc_network(widths: Sequence[int], inputs: int = 28 * 28) -> nn.Sequential:
    """Linear layers with ReLU between them, on flattened images; PyTorch's initialisation."""
    layers: list[nn.Module] = [nn.Flatten()]
    for number, width in enumerate(widths):
        layers += [nn.Linear(inputs, width), *([nn.ReLU()] if number < len(widths) - 1 else [])]
        inputs = width
    return nn.Sequential(*layers)


class VGG16(nn.Module):
    """VGG16 for 32 x 32 pixels, with batch normalisation and one linear layer.

    Args:
        classes: number of labels.
        width: factor on the channels of all layers; 1 is VGG16.
    """

    def __init__(self, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for channels in (round(each * width) for each in _VGG16):
            if channels == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [
                nn.Conv2d(inputs, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
            ]
            inputs = channels
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape (images, classes)."""
        logits: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return logits


class _CifarBlock(nn.Module):
    """Two convolutions and a shortcut without parameters: every second pixel, and channels of
    zeros (option A).
    """

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.padding = (channels - inputs) // 2

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(images)))))
        shortcut = images[:, :, :: self.stride, :: self.stride]
        return functional.relu(
            hidden + functional.pad(shortcut, (0, 0, 0, 0, self.padding, self.padding))
        )


class CifarResNet(nn.Module):
    """ResNet of 6n + 2 layers for CIFAR-10 (He et al. 2016, section 4.2): three stages of n
    blocks, 16, 32 and 64 channels.
    """

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(_CifarBlock(16, 16, 1) for _ in range(blocks)))
        self.layer2 = nn.Sequential(
            *(_CifarBlock(32 if n else 16, 32, 1 if n else 2) for n in range(blocks))
        )
        self.layer3 = nn.Sequential(
            *(_CifarBlock(64 if n else 32, 64, 1 if n else 2) for n in range(blocks))
        )
        self.linear = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape (images, classes)."""
        hidden = functional.relu(self.bn1(self.conv1(images)))
        hidden = self.layer3(self.layer2(self.layer1(hidden)))
        logits: Tensor = self.linear(hidden.mean((2, 3)))
        return logits


def given_resnet(depth: int, data: Path) -> CifarResNet:
    """A trained ResNet-20, 32, 44 or 56 from `resnet_cifar10` in the folder of the data sets, in
    evaluation mode.

    Raises:
        UserError: its weights are not there, or are those of another network.
    """
    from safetensors.torch import load_file

    path = data / "resnet_cifar10" / f"resnet{depth}.safetensors"
    if not path.is_file():
        raise UserError(
            f"{path}: no such file. Put the weights of ResNet-{depth} for CIFAR-10 with option-A "
            "shortcuts there, with the names conv1, bn1, layer1.0.conv1, ..., linear; or give "
            "another --data."
        )
    model = CifarResNet(depth)
    missing, unexpected = model.load_state_dict(load_file(path), strict=False)
    wrong = [name for name in (*missing, *unexpected) if "num_batches_tracked" not in name]
    if wrong:
        raise UserError(f"{path}: not the weights of ResNet-{depth}: {wrong[0]} does not fit.")
    return model.eval()


class _Block(nn.Module):
    """A block of ResNet-18 (basic) or ResNet-50 (bottleneck), with a 1 x 1 convolution where the
    shape changes.
    """

    def __init__(self, inputs: int, channels: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = channels * (4 if bottleneck else 1)
        sizes = [(inputs, channels, 1), (channels, channels, 3), (channels, outputs, 1)]
        sizes = sizes if bottleneck else [(inputs, channels, 3), (channels, channels, 3)]
        strided = 1 if bottleneck else 0
        layers: list[nn.Module] = []
        for number, (before, after, kernel) in enumerate(sizes):
            step = stride if number == strided else 1
            layers += [
                nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.body(images) + self.shortcut(images))


class ResNet(nn.Module):
    """ResNet-18 or ResNet-50 with a first convolution of 3 x 3 for small images, as is usual for
    CIFAR-100.
    """

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        counts, bottleneck = {18: ((2, 2, 2, 2), False), 50: ((3, 4, 6, 3), True)}[depth]
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
        ]
        inputs = 64
        for stage, count in enumerate(counts):
            for number in range(count):
                channels = 64 << stage
                layers.append(
                    _Block(inputs, channels, 2 if stage and not number else 1, bottleneck)
                )
                inputs = channels * (4 if bottleneck else 1)
        self.features = nn.Sequential(*layers)
        self.linear = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape (images, classes)."""
        logits: Tensor = self.linear(self.features(images).mean((2, 3)))
        return logits


def new_network(name: str, classes: int, width: float, inputs: int) -> nn.Module:
    """A network by name: fc2, fc5, fc12, vgg16, resnet18 or resnet50, with random weights of the
    current seed.

    Args:
        width: of VGG16, as a factor.
        inputs: values of an image, for the fully connected ones.
    """
    if name in FC_WIDTHS:
        return fc_network((*FC_WIDTHS[name][:-1], classes), inputs)
    if name == "vgg16":
        return VGG16(classes, width)
    if name in ("resnet18", "resnet50"):
        return ResNet(int(name[-2:]), classes)
    raise UserError(
        f"--models {name!r} is not one of {', '.join(FC_WIDTHS)}, vgg16, resnet18, resnet50."
    )


def count_weights(model: nn.Module) -> int:
    """The number of weights of the linear and convolutional layers."""
    return sum(weight.numel() for weight in layer_weights(model).values())


def layer_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the linear and convolutional layers, by name; biases and normalisation are
    not among them.
    """
    return {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv1d)
    }
