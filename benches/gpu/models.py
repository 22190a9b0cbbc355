"""The modules of the cases in plain PyTorch, their batches and their initial weights: what is exported is what PyTorch trains."""

import torch
from torch import nn
from torch.nn import functional as F

import cases


class Attention(nn.Module):
    """Attention of `heads` over `kv_heads` keys and values, by one product for all three; with positions by rotation where asked for."""

    def __init__(self, width, heads, kv_heads=None, bias=True, causal=True):
        super().__init__()
        self.head, self.heads, self.kv_heads, self.causal = width // heads, heads, kv_heads or heads, causal
        self.qkv = nn.Linear(width, (heads + 2 * self.kv_heads) * self.head, bias)
        self.out = nn.Linear(width, width, bias)

    def forward(self, x, turn=None):
        pieces = self.qkv(x).split([n * self.head for n in (self.heads, self.kv_heads, self.kv_heads)], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, self.head)).transpose(1, 2) for y in pieces)
        if turn is not None:
            q, k = turned(q, *turn), turned(k, *turn)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.kv_heads != self.heads)
        return self.out(y.transpose(1, 2).flatten(2))


def turned(x, cos, sin):
    """Rotary positions (Su et al. 2021) on halves of a head, as transformers' Llama has them. x: [batch, heads, length, head]."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class GptBlock(nn.Module):
    """GPT-2's (Radford et al. 2019): norms before, GELU by tanh."""

    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.attention, self.ln_2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2 without dropout; the head is the token embedding."""

    looked_up = ("positions.weight",)

    def __init__(self, layers, width, heads, vocab, length):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    """Llama's (Touvron et al. 2023): RMSNorm before, SwiGLU, no biases."""

    def __init__(self, width, heads, kv_heads, inner):
        super().__init__()
        self.norm_1, self.attention = nn.RMSNorm(width, 1e-5), Attention(width, heads, kv_heads, bias=False)
        self.norm_2, self.gate = nn.RMSNorm(width, 1e-5), nn.Linear(width, inner, bias=False)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x, turn):
        x = x + self.attention(self.norm_1(x), turn)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Llama with grouped queries; TinyLlama's sizes in `cases.py` (Zhang et al. 2024)."""

    looked_up = ("tokens.weight",)

    def __init__(self, layers, width, heads, kv_heads, inner, vocab, length):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, inner) for _ in range(layers))
        self.norm, self.head, self.dim = nn.RMSNorm(width, 1e-5), nn.Linear(width, vocab, bias=False), width // heads

    def forward(self, input_ids):
        device = input_ids.device
        rates = 10000.0 ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / -self.dim)
        angles = torch.arange(input_ids.shape[1], device=device, dtype=torch.float32)[:, None] * rates
        angles = torch.cat((angles, angles), dim=-1)
        turn, x = (angles.cos(), angles.sin()), self.tokens(input_ids)
        for block in self.blocks:
            x = block(x, turn)
        return self.head(self.norm(x))


class BertBlock(nn.Module):
    """BERT's (Devlin et al. 2018): norms after, exact GELU."""

    def __init__(self, width, heads):
        super().__init__()
        self.attention, self.norm_1 = Attention(width, heads, causal=False), nn.LayerNorm(width, 1e-12)
        self.up, self.down, self.norm_2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width, 1e-12)

    def forward(self, x):
        x = self.norm_1(x + self.attention(x))
        return self.norm_2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """BERT that guesses masked words, without dropout; sequences are full, so there is no mask of padding."""

    looked_up = ("positions.weight", "types.weight")

    def __init__(self, layers, width, heads, vocab, length):
        super().__init__()
        self.tokens, self.positions, self.types = nn.Embedding(vocab, width), nn.Embedding(length, width), nn.Embedding(2, width)
        self.norm, self.blocks = nn.LayerNorm(width, 1e-12), nn.ModuleList(BertBlock(width, heads) for _ in range(layers))
        self.dense, self.norm_out, self.head = nn.Linear(width, width), nn.LayerNorm(width, 1e-12), nn.Linear(width, vocab)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids, token_type_ids):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.tokens(input_ids) + self.positions(places) + self.types(token_type_ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm_out(F.gelu(self.dense(x))))


def norm_conv(a, b, size=1, stride=1):
    return nn.Sequential(nn.Conv2d(a, b, size, stride, size // 2, bias=False), nn.BatchNorm2d(b))


class Bottleneck(nn.Module):
    """ResNet's (He et al. 2016), with the stride in the middle: narrow, 3 x 3, wide; the way around is a convolution where shapes change."""

    def __init__(self, a, b, stride):
        super().__init__()
        self.narrow, self.middle, self.wide = norm_conv(a, b // 4), norm_conv(b // 4, b // 4, 3, stride), norm_conv(b // 4, b)
        self.around = norm_conv(a, b, 1, stride) if a != b else nn.Identity()

    def forward(self, x):
        y = self.wide(F.relu(self.middle(F.relu(self.narrow(x)))))
        return F.relu(y + self.around(x))


class ResNet(nn.Module):
    """ResNet for ImageNet: a stem of 7 x 7, four stages, the mean over pixels, a linear layer."""

    looked_up = ()

    def __init__(self, size, blocks, width, classes):
        super().__init__()
        self.stem, layers, a = norm_conv(3, width, 7, 2), [], width
        for stage, count in enumerate(blocks):
            b = 4 * width * 2**stage
            layers += [Bottleneck(a if not i else b, b, 2 if stage and not i else 1) for i in range(count)]
            a = b
        self.blocks, self.head = nn.Sequential(*layers), nn.Linear(a, classes)

    def forward(self, image):
        x = F.max_pool2d(F.relu(self.stem(image)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class Mlp(nn.Module):
    looked_up = ()

    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, image):
        for layer in self.layers[:-1]:
            image = F.relu(layer(image))
        return self.layers[-1](image)


FAMILIES = {"gpt": Gpt, "llama": Llama, "bert": Bert, "resnet": ResNet, "mlp": Mlp}


def module_of(case, device):
    """In training mode, its weights not yet set: memory that is not written takes none."""
    with torch.device("meta"):
        module = FAMILIES[case.family](**case.config)
    tied = hasattr(module, "head") and module.head.weight is getattr(getattr(module, "tokens", None), "weight", None)
    module = module.to_empty(device=device)
    if tied:
        module.head.weight = module.tokens.weight
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.reset_running_stats()
    return module.train()


def fill(module, case):
    """Weights spread as dcc's `--init` does, though not the same: uniform, by default with a deviation of 0.02; gains 1; biases 0."""
    deviation = float(case.rules[0].split("std:")[1]) if case.rules else 0.02
    torch.manual_seed(cases.SEED)
    with torch.no_grad():
        for m in module.modules():
            for name, p in m.named_parameters(recurse=False):
                if p.dim() > 1:
                    p.uniform_(-(3**0.5) * deviation, 3**0.5 * deviation)
                else:
                    p.fill_(float(name == "weight"))


def parameters(module):
    """How many there are, each once; and those of them that every token or sample meets: not what is only looked up."""
    named = dict(module.named_parameters())
    return sum(p.numel() for p in named.values()), sum(p.numel() for n, p in named.items() if n not in module.looked_up)


def batches(case):
    """{input: rows of all batches, and `labels`}: words of which few are frequent, so that there is something to learn; pixels at
    random, and labels that depend on them."""
    rng, c, count = torch.Generator().manual_seed(cases.SEED), case.config, case.batch * case.kept
    if case.family == "mlp":
        image = torch.rand((count, c["widths"][0]), generator=rng)
        return {"image": image, "labels": (image.sum(1) * 16).long() % c["widths"][-1]}
    if case.family == "resnet":
        image = torch.randn((count, 3, c["size"], c["size"]), generator=rng)
        return {"image": image, "labels": torch.randint(0, c["classes"], (count,), generator=rng)}
    words = (torch.rand((count, c["length"] + 1), generator=rng) ** 3 * c["vocab"]).long()
    if case.family != "bert":
        return {"input_ids": words[:, :-1].contiguous(), "labels": words[:, 1:].contiguous()}
    ids = words[:, :-1]
    guessed = torch.rand(ids.shape, generator=rng).argsort(1) < round(0.15 * c["length"])  # as many in each sample
    types = (torch.arange(c["length"]) >= c["length"] // 2).long().expand(ids.shape)
    return {"input_ids": ids.masked_fill(guessed, 103), "token_type_ids": types.contiguous(),
            "labels": torch.where(guessed, ids, cases.IGNORED)}
