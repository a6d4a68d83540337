"""Neural style transfer by L-BFGS; closures hold the whole step."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim


class ContentLoss(nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = target.detach()

    def forward(self, x):
        self.loss = F.mse_loss(x, self.target)
        return x


def gram(x):
    b, c, h, w = x.size()
    features = x.view(b * c, h * w)
    return features @ features.t() / (b * c * h * w)


class StyleLoss(nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = gram(target).detach()

    def forward(self, x):
        self.loss = F.mse_loss(gram(x), self.target)
        return x


def run(model, style_losses, content_losses, image, steps=300, style_weight=1e6, content_weight=1):
    image.requires_grad_(True)
    model.eval()
    model.requires_grad_(False)
    optimizer = optim.LBFGS([image])
    run_count = [0]
    while run_count[0] <= steps:

        def closure():
            with torch.no_grad():
                image.clamp_(0, 1)
            optimizer.zero_grad()
            model(image)
            style_score = 0
            content_score = 0
            for sl in style_losses:
                style_score += sl.loss
            for cl in content_losses:
                content_score += cl.loss
            loss = style_weight * style_score + content_weight * content_score
            loss.backward()
            run_count[0] += 1
            if run_count[0] % 50 == 0:
                print(run_count[0], style_score.item(), content_score.item())
            return loss

        optimizer.step(closure)
    with torch.no_grad():
        image.clamp_(0, 1)
    return image
