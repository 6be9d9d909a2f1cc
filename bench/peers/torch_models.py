"""The networks of `voltaic::models` in PyTorch, with their optimizers and batches."""

from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(784, 256), nn.Linear(256, 10)

    def forward(self, images):
        return self.fc2(F.relu(self.fc1(images.flatten(1))))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(64 * 12 * 12, 128), nn.Linear(128, 10)

    def forward(self, images):
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout1(x.flatten(1))  # flat, so that the masks do not depend on the layout
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


class BasicBlock(nn.Module):
    def __init__(self, from_channels, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(from_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or from_channels != channels:
            conv = nn.Conv2d(from_channels, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)
        for i, (from_channels, channels) in enumerate([(64, 64), (64, 128), (128, 256), (256, 512)]):
            first = BasicBlock(from_channels, channels, 1 if i == 0 else 2)
            self.add_module(f"layer{i + 1}", nn.Sequential(first, BasicBlock(channels, channels, 1)))
        self.fc = nn.Linear(512, 10)

    def forward(self, pictures):
        x = F.relu(self.bn1(self.conv1(pictures)))
        for layer in [self.layer1, self.layer2, self.layer3, self.layer4]:
            x = layer(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.n_head = n_head

    def forward(self, x):
        heads = [part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd, bias=False), CausalSelfAttention(n_embd, n_head)
        self.ln_2, self.mlp = nn.LayerNorm(n_embd, bias=False), FeedForward(n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """nanoGPT's model without biases and dropout."""

    def __init__(self, n_layer, n_head, n_embd, block_size, vocab_size=256):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab_size, n_embd),
            "wpe": nn.Embedding(block_size, n_embd),
            "h": nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer)),
            "ln_f": nn.LayerNorm(n_embd, bias=False),
        })
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, tokens):
        x = self.transformer.wte(tokens) + self.transformer.wpe.weight[: tokens.size(1)]
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def gpt_optimizer(net, fused):
    """nanoGPT's: matrices decay, norms do not."""
    groups = [
        {"params": [p for p in net.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=fused)


def image_batch(batch_size, channels, side):
    return torch.rand(batch_size, channels, side, side), torch.randint(10, (batch_size,))


def token_batch(batch_size, time, vocab_size=256):
    text = torch.randint(vocab_size, (batch_size, time + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def shards(net):
    """The parts of a network whose weights come and go together."""
    return list(net.transformer.h) if isinstance(net, Gpt) else [part for part in net.children() if list(part.parameters())]


class Workload(NamedTuple):
    build: Callable
    optimizer: Callable
    draw_batch: Callable


WORKLOADS = {
    "mlp": Workload(
        Mlp,
        lambda net, fused: torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused),
        lambda: image_batch(64, 1, 28),
    ),
    "cnn": Workload(
        ConvNet,
        lambda net, fused: torch.optim.Adam(net.parameters(), lr=1e-3, fused=fused),
        lambda: image_batch(64, 1, 28),
    ),
    "resnet18": Workload(
        ResNet18,
        lambda net, fused: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=fused),
        lambda: image_batch(32, 3, 32),
    ),
    "gpt-tiny": Workload(lambda: Gpt(4, 4, 128, 64), gpt_optimizer, lambda: token_batch(12, 64)),
    "gpt-mini": Workload(lambda: Gpt(6, 6, 384, 256), gpt_optimizer, lambda: token_batch(4, 256)),
    "gpt2": Workload(lambda: Gpt(12, 12, 768, 1024, 50304), gpt_optimizer, lambda: token_batch(8, 1024, 50304)),
}
