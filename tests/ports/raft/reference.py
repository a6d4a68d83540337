"""A small RAFT: optical flow by lookups in the correlations of all pairs of pixels."""

import torch
from torch import nn
from torch.nn import functional as F

FEATURES, HIDDEN, CONTEXT = 16, 12, 8
LEVELS, RADIUS, ITERATIONS = 3, 2, 3
GAMMA, MAX_FLOW = 0.8, 9.0


def norm(norm_fn, planes):
    if norm_fn == "batch":
        return nn.BatchNorm2d(planes)
    return nn.InstanceNorm2d(planes)


class ResidualBlock(nn.Module):
    def __init__(self, in_planes, planes, norm_fn, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, padding=1, stride=stride)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1)
        self.norm1 = norm(norm_fn, planes)
        self.norm2 = norm(norm_fn, planes)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_planes, planes, 1, stride=stride), norm(norm_fn, planes)
            )

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        if self.downsample is not None:
            x = self.downsample(x)
        return F.relu(x + y)


class Encoder(nn.Module):
    def __init__(self, output_dim, norm_fn):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, stride=2, padding=3)
        self.norm1 = norm(norm_fn, 8)
        self.layer1 = ResidualBlock(8, 8, norm_fn)
        self.layer2 = ResidualBlock(8, 12, norm_fn, stride=2)
        self.conv2 = nn.Conv2d(12, output_dim, 1)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.conv2(x)


def coords_grid(batch, height, width):
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([x, y]).float()[None].repeat(batch, 1, 1, 1)


def bilinear_sampler(img, coords):
    """Sample at coordinates in pixels."""
    height, width = img.shape[-2:]
    xgrid, ygrid = coords.split([1, 1], dim=-1)
    xgrid = 2 * xgrid / (width - 1) - 1
    ygrid = 2 * ygrid / (height - 1) - 1
    return F.grid_sample(img, torch.cat([xgrid, ygrid], dim=-1), align_corners=True)


class CorrBlock:
    def __init__(self, fmap1, fmap2):
        batch, dim, h, w = fmap1.shape
        corr = torch.matmul(fmap1.flatten(2).transpose(1, 2), fmap2.flatten(2))
        corr = corr.reshape(batch * h * w, 1, h, w) / dim**0.5
        self.corr_pyramid = [corr]
        for _ in range(LEVELS - 1):
            corr = F.avg_pool2d(corr, 2, stride=2)
            self.corr_pyramid.append(corr)

    def __call__(self, coords):
        coords = coords.permute(0, 2, 3, 1)
        batch, h, w, _ = coords.shape
        d = torch.arange(-RADIUS, RADIUS + 1, dtype=coords.dtype)
        delta = torch.stack(torch.meshgrid(d, d, indexing="ij"), dim=-1)
        out = []
        for i, corr in enumerate(self.corr_pyramid):
            centroid = coords.reshape(batch * h * w, 1, 1, 2) / 2**i
            corr = bilinear_sampler(corr, centroid + delta)
            out.append(corr.view(batch, h, w, -1))
        return torch.cat(out, dim=-1).permute(0, 3, 1, 2)


class SepConvGRU(nn.Module):
    def __init__(self, hidden_dim, input_dim):
        super().__init__()
        dim = hidden_dim + input_dim
        self.convz1 = nn.Conv2d(dim, hidden_dim, (1, 5), padding=(0, 2))
        self.convr1 = nn.Conv2d(dim, hidden_dim, (1, 5), padding=(0, 2))
        self.convq1 = nn.Conv2d(dim, hidden_dim, (1, 5), padding=(0, 2))
        self.convz2 = nn.Conv2d(dim, hidden_dim, (5, 1), padding=(2, 0))
        self.convr2 = nn.Conv2d(dim, hidden_dim, (5, 1), padding=(2, 0))
        self.convq2 = nn.Conv2d(dim, hidden_dim, (5, 1), padding=(2, 0))

    def forward(self, h, x):
        hx = torch.cat([h, x], dim=1)
        z = torch.sigmoid(self.convz1(hx))
        r = torch.sigmoid(self.convr1(hx))
        q = torch.tanh(self.convq1(torch.cat([r * h, x], dim=1)))
        h = (1 - z) * h + z * q

        hx = torch.cat([h, x], dim=1)
        z = torch.sigmoid(self.convz2(hx))
        r = torch.sigmoid(self.convr2(hx))
        q = torch.tanh(self.convq2(torch.cat([r * h, x], dim=1)))
        return (1 - z) * h + z * q


class MotionEncoder(nn.Module):
    def __init__(self, output_dim=16):
        super().__init__()
        self.convc1 = nn.Conv2d(LEVELS * (2 * RADIUS + 1) ** 2, 16, 1)
        self.convc2 = nn.Conv2d(16, 12, 3, padding=1)
        self.convf1 = nn.Conv2d(2, 12, 7, padding=3)
        self.convf2 = nn.Conv2d(12, 8, 3, padding=1)
        self.conv = nn.Conv2d(12 + 8, output_dim - 2, 3, padding=1)

    def forward(self, flow, corr):
        cor = F.relu(self.convc1(corr))
        cor = F.relu(self.convc2(cor))
        flo = F.relu(self.convf1(flow))
        flo = F.relu(self.convf2(flo))
        out = F.relu(self.conv(torch.cat([cor, flo], dim=1)))
        return torch.cat([out, flow], dim=1)


class FlowHead(nn.Module):
    def __init__(self, input_dim, hidden_dim=16):
        super().__init__()
        self.conv1 = nn.Conv2d(input_dim, hidden_dim, 3, padding=1)
        self.conv2 = nn.Conv2d(hidden_dim, 2, 3, padding=1)

    def forward(self, x):
        return self.conv2(F.relu(self.conv1(x)))


class UpdateBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = MotionEncoder()
        self.gru = SepConvGRU(HIDDEN, CONTEXT + 16)
        self.flow_head = FlowHead(HIDDEN)
        self.mask = nn.Sequential(
            nn.Conv2d(HIDDEN, 20, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(20, 4 * 4 * 9, 1),
        )

    def forward(self, net, inp, corr, flow):
        motion = self.encoder(flow, corr)
        net = self.gru(net, torch.cat([inp, motion], dim=1))
        delta_flow = self.flow_head(net)
        # scale the mask to balance gradients
        mask = 0.25 * self.mask(net)
        return net, mask, delta_flow


class RAFT(nn.Module):
    def __init__(self):
        super().__init__()
        self.fnet = Encoder(FEATURES, "instance")
        self.cnet = Encoder(HIDDEN + CONTEXT, "batch")
        self.update_block = UpdateBlock()

    def upsample_flow(self, flow, mask):
        """Upsample by 4 with convex combinations of the neighbours."""
        n, _, h, w = flow.shape
        mask = torch.softmax(mask.view(n, 1, 9, 4, 4, h, w), dim=2)
        up_flow = F.unfold(4 * flow, [3, 3], padding=1)
        up_flow = up_flow.view(n, 2, 9, 1, 1, h, w)
        up_flow = torch.sum(mask * up_flow, dim=2)
        return up_flow.permute(0, 1, 4, 2, 5, 3).reshape(n, 2, 4 * h, 4 * w)

    def forward(self, image1, image2):
        image1 = 2 * (image1 / 255.0) - 1.0
        image2 = 2 * (image2 / 255.0) - 1.0

        fmap1, fmap2 = self.fnet(torch.cat([image1, image2])).chunk(2)
        corr_fn = CorrBlock(fmap1, fmap2)

        cnet = self.cnet(image1)
        net, inp = cnet.split([HIDDEN, CONTEXT], dim=1)
        net, inp = torch.tanh(net), torch.relu(inp)

        batch, _, h, w = fmap1.shape
        coords0 = coords_grid(batch, h, w).to(fmap1)
        coords1 = coords0
        flow_predictions = []
        for _ in range(ITERATIONS):
            coords1 = coords1.detach()
            corr = corr_fn(coords1)
            flow = coords1 - coords0
            net, up_mask, delta_flow = self.update_block(net, inp, corr, flow)
            coords1 = coords1 + delta_flow
            flow_predictions.append(self.upsample_flow(coords1 - coords0, up_mask))
        return coords1 - coords0, flow_predictions


def model():
    torch.manual_seed(970)
    net = RAFT()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                module.bias.uniform_(-0.3, 0.3)
            elif isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.3)
                module.running_mean.normal_(0, 0.4)
                module.running_var.uniform_(0.3, 1.5)
        net.update_block.flow_head.conv2.weight.mul_(0.4)
        net.update_block.mask[2].weight.mul_(2)
    # the norms are frozen, as they are after the first stage of training
    return net.eval()


def batches():
    generator = torch.Generator().manual_seed(971)
    made = []
    for _ in range(2):
        coarse = torch.rand(2, 3, 11, 16, generator=generator)
        scene = F.interpolate(coarse, size=(44, 60), mode="bicubic").clamp(0, 1)
        scene = 0.8 * scene + 0.2 * torch.rand(2, 3, 44, 60, generator=generator)
        flow = 5 * torch.randn(2, 2, 3, 4, generator=generator)
        flow = F.interpolate(flow, size=(32, 48), mode="bilinear", align_corners=True)
        made.append(
            {
                "image1": 255 * scene[..., 6:38, 6:54],
                "image2": 255 * scene[..., 4:36, 9:57],
                "flow": flow,
                "valid": (torch.rand(2, 32, 48, generator=generator) < 0.8).float(),
            }
        )
    return made


def forward(net, batch):
    flow_low, predictions = net(batch["image1"], batch["image2"])
    output = {f"flow_{i}": flow for i, flow in enumerate(predictions)}
    return {"flow_low": flow_low, **output}


def loss(output, batch):
    """Sum over the predictions, the last weighted most."""
    flow_gt = batch["flow"]
    mag = torch.sum(flow_gt**2, dim=1).sqrt()
    valid = (batch["valid"] >= 0.5) & (mag < MAX_FLOW)
    flow_loss = 0.0
    for i in range(ITERATIONS):
        weight = GAMMA ** (ITERATIONS - i - 1)
        i_loss = (output[f"flow_{i}"] - flow_gt).abs()
        flow_loss = flow_loss + weight * (valid[:, None] * i_loss).mean()
    return flow_loss
