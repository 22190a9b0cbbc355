"""The models of the benchmark, their batches and how all programs train them. Plain data: every environment reads it."""

from dataclasses import dataclass, field

ADAMW = dict(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
SEED = 1
BATCHES = 4  # different ones, in turn
IGNORED = -100  # the label that counts for nothing


@dataclass(frozen=True)
class Case:
    """A model. family: its definitions in `graphs.py` and `jax_models.py`, made with `config`; rules: `--init-rule`s of dcc;
    rate: the learning rate; later: how far losses after the first may lie apart, of themselves; bar, bar_2: how many times as fast as the fastest peer dcc is to be on 1 and 2 threads; memory: of the leanest peer's memory;
    keep: dcc's flags for what is kept for the backward pass."""

    name: str
    title: str
    family: str
    batch: int
    config: dict = field(default_factory=dict)
    rules: tuple = ()
    rate: float = 1e-3
    later: float = 2e-5
    bar: float = 1.25
    bar_2: float = 1.15
    memory: float = 0.6
    keep: str = "--recompute selective"

    @property
    def short(self):
        """The title without sizes."""
        return self.title.split(",")[0].split(" (")[0]

    @property
    def is_text(self):
        return self.family in ("gpt", "llama", "bert")

    @property
    def tokens(self):
        return self.batch * self.config.get("length", 0)

    @property
    def flops(self):
        """Of a step of a GPT: 6 for each parameter in a product and token, 12 x layers x width x length for attention's products
        (Chowdhery et al. 2022, appendix B, which counts what the causal mask hides)."""
        c = self.config
        width, layers = c["width"], c["layers"]
        return self.tokens * (6 * (12 * layers * width**2 + c["vocab"] * width) + 12 * layers * width * c["length"])


MINI = dict(length=128, width=256, layers=4)

SIX = [
    Case("mlp", "MLP (784-1024-1024-10), batch 128", "mlp", 128, dict(widths=(784, 1024, 1024, 10)), ("*.weight=std:0.04",),
         later=1e-4, bar=1.1, bar_2=1.0, memory=0.75),
    Case("gpt2", "GPT-2 124M (12 x 768), 2 x 256 tokens", "gpt", 2, dict(vocab=50257, length=256, width=768, layers=12, heads=12), memory=0.75),
    Case("gpt-mini", "GPT mini (4 x 256), 8 x 128 tokens", "gpt", 8, dict(vocab=8192, heads=4, **MINI)),
    Case("llama-mini", "Llama mini (4 x 256), 8 x 128 tokens", "llama", 8, dict(vocab=8192, heads=8, kv_heads=4, inner=688, **MINI)),
    Case("bert-mini", "BERT mini (4 x 256), 8 x 128 tokens", "bert", 8, dict(vocab=30522, heads=4, inner=1024, **MINI)),
    Case("vit-tiny", "ViT tiny (12 x 192), 32 images of 64 x 64", "vit", 32, dict(size=64, patch=8, width=192, layers=12, heads=3, classes=100)),
]
RESNETS = [
    Case("resnet18", "ResNet-18, 32 images of 64 x 64", "resnet", 32, dict(size=64, bottleneck=False, blocks=(2, 2, 2, 2), classes=1000),
         rate=1e-4, later=3e-4, bar=1.1),
    Case("resnet50", "ResNet-50, 16 images of 64 x 64", "resnet", 16, dict(size=64, bottleneck=True, blocks=(3, 4, 6, 3), classes=1000),
         rate=3e-6, later=1e-3, bar=1.1, keep="--memory-limit 324MiB"),
]
CASES = {case.name: case for case in SIX + RESNETS}


def optimizer(case):
    return ADAMW | {"lr": case.rate}
