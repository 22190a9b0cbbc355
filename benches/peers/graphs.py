"""The PyTorch modules of the cases: those of `samples/` at the benchmark's sizes, and what these lack."""

import sys
from pathlib import Path

from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

sys.path.append(str(Path(__file__).resolve().parents[2] / "samples"))
import families
import models


class ResNet(nn.Module):
    """ResNet for ImageNet (He et al. 2016): a stem of 7 x 7, four stages, the mean over pixels, a linear layer."""

    def __init__(self, size, bottleneck, blocks, classes):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        layers, inner = [], 64
        for stage, count in enumerate(blocks):
            outer = 64 * 2**stage * (4 if bottleneck else 1)
            for i in range(count):
                stride = 2 if stage and not i else 1
                layers.append((families.Bottleneck if bottleneck else models.Residual)(inner, outer, stride))
                inner = outer
        self.blocks, self.head = nn.Sequential(*layers), nn.Linear(inner, classes)

    def forward(self, image):
        x = F.max_pool2d(F.relu(self.norm(self.conv(image))), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class Vit(nn.Module):
    """transformers' vision transformer."""

    def __init__(self, size, patch, width, layers, heads, classes):
        super().__init__()
        self.vit = ViTForImageClassification(ViTConfig(
            image_size=size, patch_size=patch, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=4 * width, num_labels=classes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))

    def forward(self, image):
        return self.vit(pixel_values=image).logits


def module_of(case):
    """The module in training mode, its weights whatever PyTorch gives them."""
    made = {"mlp": models.mlp, "gpt": models.gpt2, "llama": models.llama, "bert": models.bert}
    if case.family in made:
        return made[case.family](**case.config)[0]
    return {"vit": Vit, "resnet": ResNet}[case.family](**case.config).train()
