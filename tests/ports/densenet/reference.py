"""A small DenseNet-BC: squeeze and excitation behind each block, and an auxiliary classifier."""

import torch
from torch import nn
from torch.nn import functional as F

GROWTH_RATE, BN_SIZE = 6, 3
BLOCK_CONFIG = (3, 3)
NUM_CLASSES = 7
# Rare classes count more.
CLASS_WEIGHTS = torch.tensor([0.6, 1.0, 1.7, 0.8, 1.3, 2.1, 1.0])


class DenseLayer(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, BN_SIZE * GROWTH_RATE, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BN_SIZE * GROWTH_RATE)
        self.conv2 = nn.Conv2d(
            BN_SIZE * GROWTH_RATE, GROWTH_RATE, 3, padding=1, bias=False
        )

    def forward(self, features):
        x = torch.cat(features, 1)
        x = self.conv1(F.relu(self.norm1(x)))
        return self.conv2(F.relu(self.norm2(x)))


class DenseBlock(nn.Module):
    def __init__(self, layers, inputs):
        super().__init__()
        for i in range(layers):
            layer = DenseLayer(inputs + i * GROWTH_RATE)
            self.add_module(f"denselayer{i + 1}", layer)

    def forward(self, x):
        features = [x]
        for layer in self.children():
            features.append(layer(features))
        return torch.cat(features, 1)


class SqueezeExcitation(nn.Module):
    def __init__(self, channels, squeeze):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeeze, 1)
        self.fc2 = nn.Conv2d(squeeze, channels, 1)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        scale = F.relu(self.fc1(scale))
        scale = torch.sigmoid(self.fc2(scale))
        return scale * x


class Transition(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.pool = nn.AvgPool2d(2, 2, ceil_mode=True)

    def forward(self, x):
        return self.pool(self.conv(F.relu(self.norm(x))))


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        channels = 10
        self.conv0 = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.norm0 = nn.BatchNorm2d(channels)
        self.pool0 = nn.MaxPool2d(3, stride=2, padding=1)

        self.denseblock1 = DenseBlock(BLOCK_CONFIG[0], channels)
        channels += BLOCK_CONFIG[0] * GROWTH_RATE
        self.se1 = SqueezeExcitation(channels, channels // 4)
        self.transition1 = Transition(channels, channels // 2)
        channels = channels // 2
        self.aux_classifier = nn.Linear(channels, NUM_CLASSES)

        self.denseblock2 = DenseBlock(BLOCK_CONFIG[1], channels)
        channels += BLOCK_CONFIG[1] * GROWTH_RATE
        self.se2 = SqueezeExcitation(channels, channels // 4)
        self.norm5 = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, NUM_CLASSES)

    def forward(self, x):
        x = self.pool0(F.relu(self.norm0(self.conv0(x))))
        x = self.se1(self.denseblock1(x))
        x = self.transition1(x)
        aux = self.aux_classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))

        x = self.se2(self.denseblock2(x))
        x = F.relu(self.norm5(x))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return {"logits": self.classifier(x), "aux": aux}


def model():
    torch.manual_seed(1030)
    net = DenseNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)
    return net.train()


def batches():
    """Soft blots of colour with a little noise, as bytes would be."""
    generator = torch.Generator().manual_seed(1031)
    made = []
    for size in (5, 4):
        coarse = torch.rand(size, 3, 5, 4, generator=generator)
        image = nn.functional.interpolate(coarse, (32, 28), mode="bilinear")
        image = image + 0.1 * torch.randn(image.shape, generator=generator)
        made.append(
            {
                "image": (255 * image.clamp(0, 1)).round(),
                "label": torch.randint(0, 7, (size,), generator=generator),
            }
        )
    return made


def forward(net, batch):
    image = batch["image"] / 255
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return net((image - mean) / std)


def loss(output, batch):
    criterion = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1)
    main = criterion(output["logits"], batch["label"])
    return main + 0.4 * criterion(output["aux"], batch["label"])


def optimizer(net):
    """Norms and biases do not decay."""
    decay = [p for p in net.parameters() if p.dim() > 1]
    no_decay = [p for p in net.parameters() if p.dim() == 1]
    groups = [
        {"params": decay, "weight_decay": 1e-3},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
