"""A small MobileNetV3: inverted residuals, squeeze and excite, hard swish."""

import torch
from torch import nn

# kernel, expanded width, width, squeeze and excite, activation, stride
BLOCKS = (
    (3, 8, 8, True, nn.ReLU, 1),
    (3, 20, 12, False, nn.ReLU, 2),
    (5, 30, 12, True, nn.Hardswish, 1),
)


def conv_norm(inputs, outputs, kernel=1, stride=1, groups=1, act=None):
    layers = [
        nn.Conv2d(
            inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False
        ),
        nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01),
    ]
    if act is not None:
        layers.append(act(inplace=True))
    return nn.Sequential(*layers)


class SqueezeExcite(nn.Module):
    def __init__(self, width, squeezed):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(width, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, width, 1)
        self.activation = nn.ReLU()
        self.scale_activation = nn.Hardsigmoid()

    def forward(self, x):
        scale = self.activation(self.fc1(self.pool(x)))
        return self.scale_activation(self.fc2(scale)) * x


class InvertedResidual(nn.Module):
    def __init__(self, inputs, kernel, expanded, outputs, squeeze, act, stride):
        super().__init__()
        self.residual = stride == 1 and inputs == outputs
        layers = []
        if expanded != inputs:
            layers.append(conv_norm(inputs, expanded, act=act))
        layers.append(conv_norm(expanded, expanded, kernel, stride, expanded, act))
        if squeeze:
            layers.append(SqueezeExcite(expanded, max(4, expanded // 4)))
        layers.append(conv_norm(expanded, outputs))
        self.block = nn.Sequential(*layers)

    def forward(self, x):
        result = self.block(x)
        return result + x if self.residual else result


class MobileNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        width = 8
        layers = [conv_norm(3, width, 3, 2, act=nn.Hardswish)]
        for kernel, expanded, outputs, squeeze, act, stride in BLOCKS:
            layers.append(
                InvertedResidual(width, kernel, expanded, outputs, squeeze, act, stride)
            )
            width = outputs
        layers.append(conv_norm(width, 36, act=nn.Hardswish))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(36, 24), nn.Hardswish(), nn.Linear(24, classes)
        )

    def forward(self, x):
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


def model():
    torch.manual_seed(500)
    net = MobileNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.6)
                module.bias.normal_(0, 0.3)
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.8, 1.2)
    return net


def batches():
    generator = torch.Generator().manual_seed(501)
    image = torch.randn(4, 3, 16, 16, generator=generator)
    image = image + torch.roll(image, 1, 2)
    return [{"image": image, "label": torch.tensor([3, 0, 4, 1])}]


def forward(net, batch):
    return net(batch["image"])


def loss(output, batch):
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    return criterion(output, batch["label"])


def optimizer(net):
    return torch.optim.RMSprop(
        net.parameters(),
        lr=0.002,
        alpha=0.9,
        eps=0.002,
        momentum=0.9,
        weight_decay=1e-4,
    )
