"""The PyTorch models behind the committed ONNX graphs: each function gives a module in training mode and example inputs."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (BertConfig, BertForMaskedLM, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel,
                          GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM)


class Mlp(nn.Module):
    """A ReLU network on `image`; with `loss`, takes `labels` and gives the loss."""

    def __init__(self, widths, dropout=0.0, loss=None):
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.dropout, self.loss = nn.Dropout(dropout), loss

    def forward(self, image, labels=None):
        x = image
        for layer in self.fc[:-1]:
            x = self.dropout(F.relu(layer(x)))
        logits = self.fc[-1](x)
        if self.loss == "sce":
            return F.cross_entropy(logits, labels, ignore_index=-100)
        if self.loss == "nll":
            return F.nll_loss(F.log_softmax(logits, dim=-1), labels, ignore_index=-100)
        return logits


class NormMlp(nn.Module):
    """A network on `image` with batch normalisation of vectors, and of the channels of what follows."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.fc2 = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 40)
        self.norm2, self.out = nn.BatchNorm2d(5, momentum=0.3), nn.Linear(40, 10)

    def forward(self, image):
        x = F.relu(self.norm(self.fc(image)))
        x = self.norm2(self.fc2(x).view(-1, 5, 4, 2))
        return self.out(F.relu(x).flatten(1))


class Recurrent(nn.Module):
    """A classifier of `image` as a sequence of its eight rows."""

    def __init__(self, kind, width=12, **kw):
        super().__init__()
        self.rnn = getattr(nn, kind)(8, width, batch_first=True, **kw)
        self.out = nn.Linear(width * (2 if kw.get("bidirectional") else 1), 10)

    def forward(self, image):
        y, _ = self.rnn(image.view(-1, 8, 8))
        return self.out(y[:, -1])


class Cnn(nn.Module):
    """8 x 8 images through every kind of convolution and pool: grouped, depthwise, pointwise, dilated, transposed."""

    def __init__(self):
        super().__init__()
        self.stem, self.grouped = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 12, (3, 2), stride=(1, 2), padding=1, groups=2)
        self.depthwise, self.pointwise = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False), nn.Conv2d(12, 16, 1)
        self.up, self.wide = nn.ConvTranspose2d(16, 8, 3, stride=2, output_padding=1), nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.head = nn.Linear(8, 10)

    def forward(self, image):
        x = F.relu(self.stem(image.unflatten(1, (1, 8, 8))))
        x = F.relu(self.grouped(F.max_pool2d(x, 3, stride=2, padding=1)))
        x = F.relu(self.pointwise(self.depthwise(x)))
        x = F.avg_pool2d(x, 2, stride=2, padding=1, count_include_pad=False)
        x = F.relu(self.wide(F.relu(self.up(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Residual(nn.Module):
    """The basic block of ResNet (He et al. 2015): two convolutions with BatchNorm beside an identity or a projection."""

    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.norm2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.down = None
        if stride != 1 or inner != outer:
            self.down = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    """The ResNet of the paper's section on CIFAR-10, three stages of blocks, on 8 x 8 images in one row."""

    def __init__(self, blocks, widths):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0])
        plan = [(a if i == 0 else b, b, 1 + (a != b and i == 0)) for a, b in zip(widths[:1] + widths, widths) for i in range(blocks)]
        self.blocks, self.head = nn.Sequential(*(Residual(*sizes) for sizes in plan)), nn.Linear(widths[-1], 10)

    def forward(self, image):
        x = F.relu(self.norm(self.conv(image.unflatten(1, (1, 8, 8)))))
        return self.head(self.blocks(x).mean((2, 3)))


class TwoInputs(nn.Module):
    """Two batched inputs, an unbatched one (`basis`), two outputs; only `prediction` reaches the loss."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(12, 24), nn.Linear(5, 24, bias=False)
        self.norm, self.out, self.side = nn.LayerNorm(24), nn.Linear(24, 3), nn.Linear(24, 2)

    def forward(self, a, b, basis):
        h = torch.tanh(self.left(a) @ basis) * torch.sigmoid(self.right(b))
        h = self.norm(h + F.gelu(h @ basis.T))
        return self.out(h), F.softmax(self.side(h), dim=-1)


class Attention(nn.Module):
    """Causal self-attention written as nanoGPT does, for the exporters that refuse the transformers models."""

    def __init__(self, width, heads, sdpa):
        super().__init__()
        self.qkv, self.proj, self.heads, self.sdpa = nn.Linear(width, 3 * width), nn.Linear(width, width), heads, sdpa
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            a = (q @ k.transpose(-2, -1)) * (c // self.heads) ** -0.5
            y = F.softmax(a.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")), dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class NanoGpt(nn.Module):
    """One block of a GPT in plain torch: embedding, attention, tanh-GELU, untied head."""

    def __init__(self, sdpa, vocab=31, width=16):
        super().__init__()
        self.wte, self.ln_1, self.attn = nn.Embedding(vocab, width), nn.LayerNorm(width), Attention(width, 2, sdpa)
        self.ln_2, self.fc, self.proj = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids):
        x = self.wte(input_ids)
        x = x + self.attn(self.ln_1(x))
        x = x + self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))
        return self.head(self.ln_f(x))


class Mixer(nn.Module):
    """An MLP-Mixer block on patches (Tolstikhin et al. 2021): products over the patches as well as over the channels."""

    def __init__(self, patches=10, channels=32, classes=7):
        super().__init__()
        self.embed, self.norm_1, self.norm_2 = nn.Linear(12, channels), nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.patch_1, self.patch_2 = nn.Linear(patches, 24), nn.Linear(24, patches)
        self.channel_1, self.channel_2 = nn.Linear(channels, 64), nn.Linear(64, channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, patches):
        x = self.embed(patches)
        x = x + self.patch_2(F.gelu(self.patch_1(self.norm_1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + self.channel_2(F.gelu(self.channel_1(self.norm_2(x))))
        return self.head(x.mean(1))


def mixer(batch=8):
    return Mixer().train(), {"patches": torch.rand(batch, 10, 12)}


def tokens(vocab, batch, length):
    return {"input_ids": torch.randint(0, vocab, (batch, length))}


def mlp(widths=(64, 128, 128, 10), **kw):
    labels = {"labels": torch.randint(0, widths[-1], (5,))} if kw.get("loss") else {}
    return Mlp(widths, **kw).train(), {"image": torch.rand(5, widths[0])} | labels


def norm_mlp():
    return NormMlp().train(), {"image": torch.rand(5, 64)}


def recurrent(kind, batch=5, **kw):
    return Recurrent(kind, **kw).train(), {"image": torch.rand(batch, 64)}


def resnet(blocks=2, widths=[16, 32, 64]):
    return ResNet(blocks, widths).train(), {"image": torch.rand(5, 64)}


def cnn():
    return Cnn().train(), {"image": torch.rand(5, 64)}


def two_inputs():
    return TwoInputs().train(), {"a": torch.rand(5, 12), "b": torch.rand(5, 5), "basis": torch.rand(24, 24)}


def nanogpt(sdpa):
    return NanoGpt(sdpa).train(), tokens(31, 3, 8)


def gpt2(vocab=211, length=16, width=64, layers=4, heads=4, dropout=0.0, attention="sdpa", batch=3):
    config = GPT2Config(vocab_size=vocab, n_positions=length, n_embd=width, n_layer=layers, n_head=heads, use_cache=False,
                        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, attn_implementation=attention)
    return GPT2LMHeadModel(config).train(), tokens(vocab, batch, length)


def llama(vocab=211, length=16, width=64, layers=2, heads=4, kv_heads=2, inner=None, attention="sdpa"):
    config = LlamaConfig(vocab_size=vocab, max_position_embeddings=length, hidden_size=width, intermediate_size=inner or 2 * width,
                         num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, use_cache=False,
                         attention_dropout=0.0, tie_word_embeddings=False, attn_implementation=attention)
    return LlamaForCausalLM(config).train(), tokens(vocab, 3, length)


def bert(vocab=211, length=16, width=64, layers=2, heads=4, inner=None, attention="sdpa"):
    config = BertConfig(vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                        intermediate_size=inner or 2 * width, max_position_embeddings=length, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0, attn_implementation=attention)
    inputs = tokens(vocab, 3, length)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 11:] = 0
    return BertForMaskedLM(config).train(), inputs | {"attention_mask": mask, "token_type_ids": mask * 0}


def bert_classifier(vocab=61, length=12, width=32, layers=2, heads=4, batch=8):
    """Without token types: the export repeats those of padding for every sample."""
    config = BertConfig(vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_labels=3,
                        intermediate_size=2 * width, max_position_embeddings=length, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0)
    inputs = tokens(vocab, batch, length)
    return BertForSequenceClassification(config).train(), inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}


def neox(vocab=61, length=12, width=64, layers=2, heads=4, batch=8):
    """Attention and MLP side by side: their biases have the same gradient."""
    config = GPTNeoXConfig(vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                           intermediate_size=2 * width, max_position_embeddings=length, use_cache=False)
    return GPTNeoXForCausalLM(config).train(), tokens(vocab, batch, length)


def with_mask(build):
    """The same model with `attention_mask` as a second input and bare logits as output: the form that the TorchScript
    exporter accepts (without a mask, transformers looks for packed sequences by an operator it cannot export)."""
    module, inputs = build()
    inner = module.forward
    module.forward = lambda input_ids, attention_mask: inner(input_ids=input_ids, attention_mask=attention_mask).logits
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, -2:] = 0
    return module, {"input_ids": inputs["input_ids"], "attention_mask": mask}
