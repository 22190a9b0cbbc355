"""The models that are trained on a GPU, by dcc and by PyTorch alike. Plain data: every program reads it.

    python cases.py cuda|cpu        # names, one a line, in the order that they are measured: those for a GPU, or the small ones
"""

import sys
from dataclasses import dataclass, field

ADAMW = dict(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
SEED = 1
IGNORED = -100  # the label that counts for nothing
PEAK = 989e12  # FLOP/s of an H100 or H200 (SXM), bf16, dense, by NVIDIA's data sheet


@dataclass(frozen=True)
class Case:
    """A model. family: its module in `models.py`, made with `config`; batch: samples a step, in `microbatches`; kept: different
    batches, in turn; rules: `--init-rule`s of dcc; close: how far the losses of both may lie apart, as a share of them."""

    name: str
    title: str
    family: str
    batch: int
    config: dict
    microbatches: int = 1
    steps: int = 30
    warm: int = 8
    kept: int = 4
    rate: float = 3e-4
    rules: tuple = ()
    close: float = 0.05
    bars: dict = field(default_factory=dict)

    @property
    def is_text(self):
        return self.family in ("gpt", "llama", "bert")

    @property
    def items(self):
        """What a step's speed is counted in: tokens, or samples."""
        return self.batch * self.config["length"] if self.is_text else self.batch

    def flops(self, parameters):
        """Of a step, or None where there is no formula. parameters: those that every item meets.

        6 for each parameter and token, and 12 x layers x width x length for attention's products (Chowdhery et al. 2022,
        appendix B, which counts what a causal mask hides). ResNet-50 takes 4.09 G multiply-adds an image at 224 x 224, three times
        for a training step."""
        c = self.config
        if self.is_text:
            return self.items * (6 * parameters + 12 * c["layers"] * c["width"] * c["length"])
        if self.name == "resnet50":
            return self.items * 3 * 2 * 4.09e9
        return 6 * parameters * self.items if self.family == "mlp" else None


def gpt(layers, width, heads, vocab=50304, length=1024):
    """GPT-2's vocabulary of 50257 is rounded up to a multiple of 64, as nanoGPT and llm.c do: PyTorch is slower without."""
    return dict(layers=layers, width=width, heads=heads, vocab=vocab, length=length)


FAST = dict(steps=300, warm=60)  # of a step that takes milliseconds
GPU = [
    Case("gpt2-124m", "GPT-2 124M, 64 x 1024 tokens", "gpt", 64, gpt(12, 768, 12), 4, bars=dict(speed=1.08, mfu=0.46)),
    Case("gpt2-355m", "GPT-2 355M, 32 x 1024 tokens", "gpt", 32, gpt(24, 1024, 16), 2, bars=dict(speed=1.03, mfu=0.49)),
    Case("gpt2-1.5b", "GPT-2 1.5B, 16 x 1024 tokens", "gpt", 16, gpt(48, 1600, 25), 2, steps=25, warm=5, rate=1e-4,
         bars=dict(speed=1.03, mfu=0.53)),
    Case("llama-1.1b", "Llama 1.1B, 16 x 1024 tokens", "llama", 16, dict(
        layers=22, width=2048, heads=32, kv_heads=4, inner=5632, vocab=32000, length=1024), 2, steps=25, warm=5, rate=1e-4),
    Case("bert-large", "BERT-large, 64 x 512 tokens", "bert", 64, dict(
        layers=24, width=1024, heads=16, vocab=30528, length=512), 2, rate=1e-4, bars=dict(speed=1.0)),
    Case("resnet50", "ResNet-50, 256 images of 224 x 224", "resnet", 256, dict(size=224, blocks=(3, 4, 6, 3), width=64, classes=1000),
         kept=2, rate=1e-4, close=0.1, bars=dict(speed=1.0)),
    Case("gpt-mini", "GPT mini (4 x 256), 8 x 128 tokens", "gpt", 8, gpt(4, 256, 4, 8192, 128), rate=1e-3, bars=dict(speed=1.3), **FAST),
    Case("mlp", "MLP (784-1024-1024-10), batch 128", "mlp", 128, dict(widths=(784, 1024, 1024, 10)), rate=1e-3,
         rules=("*.weight=std:0.04",), close=0.3, bars=dict(speed=1.3), **FAST),
]
TINY = dict(steps=20, warm=3, rate=1e-3)
CPU = [
    Case("tiny-gpt", "GPT tiny (2 x 64), 8 x 32 tokens", "gpt", 8, gpt(2, 64, 4, 512, 32), 2, **TINY),
    Case("tiny-llama", "Llama tiny (2 x 64), 8 x 32 tokens", "llama", 8, dict(
        layers=2, width=64, heads=4, kv_heads=2, inner=128, vocab=512, length=32), **TINY),
    Case("tiny-bert", "BERT tiny (2 x 64), 8 x 32 tokens", "bert", 8, dict(layers=2, width=64, heads=4, vocab=512, length=32), **TINY),
    Case("tiny-resnet", "ResNet tiny, 8 images of 32 x 32", "resnet", 8, dict(size=32, blocks=(1, 1, 1, 1), width=8, classes=10),
         kept=2, close=0.3, **TINY),
    Case("tiny-mlp", "MLP (64-128-10), batch 32", "mlp", 32, dict(widths=(64, 128, 10)), rules=("*.weight=std:0.04",), close=0.3, **TINY),
]
CASES = {case.name: case for case in GPU + CPU}

if __name__ == "__main__":
    print("\n".join(case.name for case in (CPU if sys.argv[1:] == ["cpu"] else GPU)))
