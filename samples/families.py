"""Small models of the families that users bring, on 8 x 8 digits or short token sequences: `models.py` has the rest."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTForImageClassification


def digits():
    return {"image": torch.rand(5, 64)}


def norm_conv(a, b, size=3, stride=1, groups=1, act=None):
    """Convolution, BatchNorm and, where there is one, an activation."""
    layers = [nn.Conv2d(a, b, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(b)]
    return nn.Sequential(*layers, *([act()] if act else []))


class Classifier(nn.Module):
    """`body` on images of one channel, the mean over pixels, a linear layer."""

    def __init__(self, body, channels):
        super().__init__()
        self.body, self.head = body, nn.Linear(channels, 10)

    def forward(self, image):
        return self.head(self.body(image.unflatten(1, (1, 8, 8))).mean((2, 3)))


class Bottleneck(nn.Module):
    """ResNet's (He et al. 2016): narrow, 3 x 3, wide; the way around is a convolution where shapes change."""

    def __init__(self, a, b, stride=1):
        super().__init__()
        self.narrow, self.middle = norm_conv(a, b // 4, 1, act=nn.ReLU), norm_conv(b // 4, b // 4, 3, stride, act=nn.ReLU)
        self.wide = norm_conv(b // 4, b, 1)
        self.around = norm_conv(a, b, 1, stride) if a != b or stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.wide(self.middle(self.narrow(x))) + self.around(x))


class Excitation(nn.Module):
    """Channels weighted by what their means say (Hu et al. 2018)."""

    def __init__(self, channels, inner):
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """MobileNetV2's block (Sandler et al. 2018): wide, depthwise, narrow without activation; EfficientNet's with `excite`."""

    def __init__(self, a, b, stride=1, size=3, act=nn.ReLU6, excite=False):
        super().__init__()
        inner = [Excitation(4 * a, a // 2)] if excite else []
        self.layers = nn.Sequential(norm_conv(a, 4 * a, 1, act=act), norm_conv(4 * a, 4 * a, size, stride, 4 * a, act),
                                    *inner, norm_conv(4 * a, b, 1))
        self.keeps = a == b and stride == 1

    def forward(self, x):
        return x + self.layers(x) if self.keeps else self.layers(x)


class ConvNext(nn.Module):
    """ConvNeXt's block (Liu et al. 2022): a large depthwise convolution, then an MLP of each pixel's channels."""

    def __init__(self, channels):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.norm, self.up, self.down = nn.LayerNorm(channels), nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class Unet(nn.Module):
    """A class of each pixel; the way up by `ConvTranspose2d`, then by interpolation."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (norm_conv(a, b, act=nn.ReLU) for a, b in ((1, 4), (4, 8), (8, 16)))
        self.up_2, self.up_1 = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, 4, 1)
        self.join_2, self.join_1, self.out = norm_conv(16, 8, act=nn.ReLU), norm_conv(8, 4, act=nn.ReLU), nn.Conv2d(4, 3, 1)

    def forward(self, image):
        a = self.first(image.unflatten(1, (1, 8, 8)))
        b = self.second(F.max_pool2d(a, 2))
        c = self.third(F.max_pool2d(b, 2))
        y = self.join_2(torch.cat([self.up_2(c), b], 1))
        y = F.interpolate(self.up_1(y), scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.out(self.join_1(torch.cat([y, a], 1)))


class Autoencoder(nn.Module):
    """Images through four channels of 2 x 2 and back."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 3, 2, 1), nn.Tanh())
        self.decode = nn.Sequential(nn.ConvTranspose2d(4, 8, 3, 2, 1, 1), nn.LeakyReLU(0.125), nn.ConvTranspose2d(8, 1, 4, 2, 1))

    def forward(self, image):
        return self.decode(self.encode(image.unflatten(1, (1, 8, 8)))).flatten(1)


class Vit(nn.Module):
    """transformers' vision transformer on 4 x 4 patches."""

    def __init__(self):
        super().__init__()
        config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=8,
                           patch_size=2, num_channels=1, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.vit = ViTForImageClassification(config)

    def forward(self, image):
        return self.vit(pixel_values=image.unflatten(1, (1, 8, 8))).logits


class Window(nn.Module):
    """Attention in windows with a trained bias for each distance (Swin, Liu et al. 2021)."""

    def __init__(self, channels=16, heads=4, window=4):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(channels), nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.bias, self.heads, self.window = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads)), heads, window
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        distance = at[:, :, None] - at[:, None, :] + window - 1
        self.register_buffer("index", (distance[0] * (2 * window - 1) + distance[1]).flatten())

    def forward(self, x):
        count, size = x.shape[2] // self.window, self.window
        y = self.norm(x.permute(0, 2, 3, 1)).unflatten(1, (count, size)).unflatten(3, (count, size))
        y = y.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # b, windows, positions, channels
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(2, 3) for z in self.qkv(y).chunk(3, -1))
        bias = self.bias[self.index].view(size * size, size * size, self.heads).permute(2, 0, 1)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias
        y = self.out((scores.softmax(-1) @ v).transpose(2, 3).flatten(3))
        y = y.unflatten(1, (count, count)).unflatten(3, (size, size)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return x + y.permute(0, 3, 1, 2)


class Experts(nn.Module):
    """A feed-forward layer of four experts, of which two count for each token (Shazeer et al. 2017)."""

    def __init__(self, width=32, experts=4):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(experts, a, b)) for a, b in ((width, 48), (48, width)))

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        chosen, index = p.topk(2, -1)
        weight = torch.zeros_like(p).scatter(-1, index, chosen / chosen.sum(-1, keepdim=True))
        hidden = F.silu(torch.einsum("btd,ndf->btnf", x, self.up))
        return torch.einsum("btnf,nfd,btn->btd", hidden, self.down, weight)


class Dispatched(nn.Module):
    """Four experts that get the tokens sent to them, two for each token, up to a capacity per sample, in the order of the text, first
    choices first (Lepikhin et al. 2020, algorithm 1, with samples for groups and without randomness)."""

    def __init__(self, width=32, experts=4, capacity=10):
        super().__init__()
        self.gate, self.capacity = nn.Linear(width, experts, bias=False), capacity
        self.up, self.down = (nn.Parameter(torch.randn(experts, a, b)) for a, b in ((width, 48), (48, width)))
        self.up_bias, self.down_bias = (nn.Parameter(torch.randn(experts, n)) for n in (48, width))

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        experts, slots = (torch.arange(n) for n in (p.shape[-1], self.capacity))
        first = (p.argmax(-1, keepdim=True) == experts).to(p)
        second = ((p * (1 - first)).argmax(-1, keepdim=True) == experts).to(p)
        places = first.cumsum(1) - 1, second.cumsum(1) - 1 + first.sum(1, keepdim=True)
        chosen = zip((first, second), places)
        mask_1, mask_2 = (mask.unsqueeze(-1) * (place.unsqueeze(-1) == slots).to(p) for mask, place in chosen)
        weight_1, weight_2 = ((p * mask).sum(-1)[..., None, None] for mask in (first, second))
        combine = (weight_1 * mask_1 + weight_2 * mask_2) / (weight_1 + weight_2)
        y = torch.einsum("bsec,bsd->ebcd", mask_1 + mask_2, x)
        y = F.relu(torch.einsum("ebcd,edf->ebcf", y, self.up) + self.up_bias[:, None, None])
        y = torch.einsum("ebcf,efd->ebcd", y, self.down) + self.down_bias[:, None, None]
        return torch.einsum("bsec,ebcd->bsd", combine, y)


class Moe(nn.Module):
    """A causal transformer block whose feed-forward layer is `experts`."""

    def __init__(self, vocab=211, width=32, experts=Experts):
        super().__init__()
        self.embed, self.norm_1, self.norm_2 = nn.Embedding(vocab, width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.experts = nn.Linear(width, 3 * width), nn.Linear(width, width), experts(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        q, k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + self.experts(self.norm_2(x)))


class Dlrm(nn.Module):
    """Numbers and categories, whose products two by two predict a click (Naumov et al. 2019)."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 8) for n in (11, 17, 23))
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        all_of = torch.stack([x] + [table(sparse[:, i]) for i, table in enumerate(self.tables)], 1)
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, (all_of @ all_of.transpose(1, 2))[:, i, j]], 1))


class TwoTowers(nn.Module):
    """Images and texts of a batch, each against each (CLIP, Radford et al. 2021)."""

    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, width))
        self.words, self.text = nn.Embedding(vocab, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        a = F.normalize(self.image(image), dim=-1)
        b = F.normalize(self.text(F.silu(self.words(text))).mean(1), dim=-1)
        return self.scale.exp() * a @ b.T


class T5(nn.Module):
    def __init__(self, **kw):
        super().__init__()
        config = T5Config(vocab_size=61, d_model=64, d_kv=8, d_ff=48, num_layers=1, num_decoder_layers=1, num_heads=4,
                          dropout_rate=0.0, layer_norm_epsilon=1e-3, decoder_start_token_id=0, use_cache=False, **kw)
        self.t5 = T5ForConditionalGeneration(config)

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        out = self.t5(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids, use_cache=False)
        return out.logits


def resnet():
    blocks = [Bottleneck(8, 16), Bottleneck(16, 16), Bottleneck(16, 32, 2), Bottleneck(32, 32)]
    return Classifier(nn.Sequential(norm_conv(1, 8, act=nn.ReLU), *blocks), 32).train(), digits()


def mobilenet():
    blocks = [Inverted(8, 8), Inverted(8, 12, 2), Inverted(12, 12)]
    body = nn.Sequential(norm_conv(1, 8, act=nn.ReLU6), *blocks, norm_conv(12, 24, 1, act=nn.ReLU6))
    return Classifier(body, 24).train(), digits()


def efficientnet():
    blocks = [Inverted(8, 8, act=nn.SiLU, excite=True), Inverted(8, 12, 2, 5, nn.SiLU, True)]
    body = nn.Sequential(norm_conv(1, 8, act=nn.SiLU), *blocks, norm_conv(12, 24, 1, act=nn.SiLU))
    return Classifier(body, 24).train(), digits()


def convnext():
    body = [nn.Conv2d(1, 8, 2, 2), ConvNext(8), nn.GroupNorm(1, 8), nn.Conv2d(8, 16, 2, 2), ConvNext(16)]
    return Classifier(nn.Sequential(*body), 16).train(), digits()


def swin():
    return Classifier(nn.Sequential(nn.Conv2d(1, 16, 1), Window(), Window()), 16).train(), digits()


def unet():
    return Unet().train(), digits()


def autoencoder():
    return Autoencoder().train(), digits()


def vit():
    return Vit().train(), digits()


def moe():
    return Moe().train(), {"input_ids": torch.randint(0, 211, (3, 16))}


def gshard():
    return Moe(experts=Dispatched).train(), {"input_ids": torch.randint(0, 211, (3, 16))}


def dlrm():
    return Dlrm().train(), {"dense": torch.randn(5, 6), "sparse": torch.randint(0, 11, (5, 3))}


def two_towers():
    return TwoTowers().train(), {"image": torch.rand(5, 64), "text": torch.randint(0, 31, (5, 6))}


def t5(**kw):
    ids = torch.randint(1, 61, (3, 12))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return T5(**kw).train(), {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": torch.randint(1, 61, (3, 7))}
