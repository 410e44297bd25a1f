"""ResNet and ViT in PyTorch, with torchvision's names; run by a Python that has PyTorch, writes weights and outputs.

python torch_networks.py {resnet,vit} SIZES OUT.npz
"""

import sys
from collections import OrderedDict

import numpy as np
import torch
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, features: int, stride: int) -> None:
        super().__init__()
        sizes = [(inputs, features, 1, 1), (features, features, 3, stride), (features, 4 * features, 1, 1)]
        for number, (before, after, size, step) in enumerate(sizes, 1):
            setattr(self, f"conv{number}", nn.Conv2d(before, after, size, step, size // 2, bias=False))
            setattr(self, f"bn{number}", nn.BatchNorm2d(after))
        projection = [nn.Conv2d(inputs, 4 * features, 1, stride, bias=False), nn.BatchNorm2d(4 * features)]
        self.downsample = nn.Sequential(*projection if stride > 1 or inputs != 4 * features else [])

    def forward(self, x):
        y = torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))
        return torch.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, *num_blocks: int, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        inputs = width
        for stage, count in enumerate(num_blocks):
            blocks = []
            for index in range(count):
                blocks.append(Bottleneck(inputs, width * 2**stage, 2 if stage and not index else 1))
                inputs = 4 * width * 2**stage
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.stages, self.fc = len(num_blocks), nn.Linear(inputs, classes)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        layers = (nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * width, width))
        self.mlp = nn.Sequential(*layers)

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class ViT(nn.Module):
    def __init__(self, size: int, patch: int, layers: int, width: int, heads: int, classes: int = 1000) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = nn.Module()
        self.encoder.pos_embedding = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        blocks = [(f"encoder_layer_{n}", EncoderBlock(width, heads)) for n in range(layers)]
        self.encoder.layers, self.encoder.ln = nn.Sequential(OrderedDict(blocks)), nn.LayerNorm(width, eps=1e-6)
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(width, classes)))

    def forward(self, x):
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.encoder.pos_embedding
        return self.heads(self.encoder.ln(self.encoder.layers(x))[:, 0])


if __name__ == "__main__":
    kind, sizes, out = sys.argv[1:]
    torch.manual_seed(0)
    numbers = [int(size) for size in sizes.split(",")]
    network = (ResNet(*numbers[1:], width=numbers[0]) if kind == "resnet" else ViT(*numbers)).eval()
    with torch.no_grad():
        for value in network.state_dict().values():
            if value.ndim in (2, 4):
                value.mul_(2)  # so that outputs differ between images
            elif value.is_floating_point():
                value.copy_(torch.rand_like(value) + 0.5)
        side = numbers[0] if kind == "vit" else 48
        images = torch.randn(2, 3, side, side)
        np.savez(out, images=images.permute(0, 2, 3, 1), logits=network(images), **network.state_dict())
