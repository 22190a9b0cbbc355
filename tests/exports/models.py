"""Small models of many families, with random weights: `FAMILIES[name]()` gives a module and its inputs by name."""

import sys
from pathlib import Path

import torch
import torchvision.models as vision
import transformers
from torch import nn
from torch.nn import functional as F
from torchvision.models.segmentation.deeplabv3 import DeepLabHead
from torchvision.models.segmentation.fcn import FCNHead
from torchvision.ops import FeaturePyramidNetwork

sys.path.append(str(Path(__file__).parents[2] / "samples"))
from families import Dlrm  # noqa: E402

BATCH, WORDS, CLASSES = 2, 61, 5
WIDTHS = dict(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
              max_position_embeddings=32)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


class First(nn.Module):
    """A model whose one result is `result` of the model inside, or its first."""

    def __init__(self, model, result=None, **fixed):
        super().__init__()
        self.model, self.result, self.fixed = model, result, fixed

    def forward(self, **inputs):
        found = self.model(**inputs, **self.fixed)
        if self.result:
            return getattr(found, self.result)
        return found if torch.is_tensor(found) else found[0]


class Image(First):
    def forward(self, x):
        return self.model(x)


class Positional(nn.Module):
    """`module` called by position, for the older exporter; parameters keep their names."""

    def __init__(self, module, names):
        super().__init__()
        self.model, self.whole, self.names = module.model, [module], names

    def forward(self, *values):
        return self.whole[0](**dict(zip(self.names, values)))


def words(length=12):
    return torch.randint(0, WORDS, (BATCH, length))


def built(name, config, **options):
    """`LlamaForCausalLM` with a configuration of its family."""
    family = getattr(transformers, config)
    return getattr(transformers, name)(family(**options))


def decoder(family, suffix="ForCausalLM", **options):
    """A language model of transformers with weights and widths as all have them."""
    return lambda: (First(built(family + suffix, family + "Config", **options), "logits", use_cache=False), {"input_ids": words()})


def encoder(family, suffix="ForMaskedLM", **options):
    return lambda: (First(built(family + suffix, family + "Config", **options), "logits"), {"input_ids": words()})


def two_texts(family, **options):
    def make():
        model = built(family + "ForConditionalGeneration", family + "Config", **options)
        return First(model, "logits", use_cache=False), {"input_ids": words(), "decoder_input_ids": words(7)}

    return make


def clip():
    text = dict(WIDTHS, eos_token_id=WORDS - 1)
    image = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4)
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=16)
    inputs = {"input_ids": words(), "pixel_values": torch.randn(BATCH, 3, 16, 16)}
    return First(transformers.CLIPModel(config), "logits_per_image"), inputs


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=8, d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, dropout=0.0,
        max_source_positions=16, max_target_positions=16, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48, pad_token_id=0,
    )
    model = transformers.models.whisper.modeling_whisper.WhisperEncoder(config)
    return First(model, "last_hidden_state"), {"input_features": torch.randn(BATCH, 8, 32)}


def speech():
    config = transformers.Wav2Vec2Config(
        **{**WIDTHS, "vocab_size": 20}, conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(8, 3), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, feat_extract_norm="layer",
    )
    return First(transformers.Wav2Vec2ForCTC(config), "logits"), {"input_values": torch.randn(BATCH, 400)}


def pixels(make, size=32):
    return lambda: (Image(make()), {"x": torch.randn(BATCH, 3, size, size)})


def image_encoder(family, **options):
    def make():
        model = built(family + "ForImageClassification", family + "Config", num_labels=CLASSES, **options)
        return First(model, "logits"), {"pixel_values": torch.randn(BATCH, 3, 16, 16)}

    return make


class Recurrent(nn.Module):
    def __init__(self, layer, **options):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.layer = layer(16, 12, batch_first=True, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") else 12, CLASSES)

    def forward(self, input_ids):
        return self.head(self.layer(self.embed(input_ids))[0][:, -1])


def recurrent(layer, **options):
    return lambda: (First(Recurrent(layer, **options)), {"input_ids": words()})


class UNet(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.down1, self.down2, self.down3 = self.block(3, width), self.block(width, 2 * width), self.block(2 * width, 4 * width)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.Conv2d(2 * width, width, 1)
        self.out2, self.out1 = self.block(4 * width, 2 * width), self.block(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def block(inputs, outputs):
        layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        three = self.down3(F.max_pool2d(two, 2))
        two = self.out2(torch.cat([self.up2(three), two], 1))
        wide = F.interpolate(self.up1(two), scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.head(self.out1(torch.cat([wide, one], 1)))


class Segmenter(nn.Module):
    """A small backbone, a head of torchvision, and its result at the image's size."""

    def __init__(self, head):
        super().__init__()
        stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*stem, nn.Conv2d(16, 16, 3, 2, 1))
        self.head = head(16, CLASSES)

    def forward(self, x):
        return F.interpolate(self.head(self.body(x)), size=x.shape[-2:], mode="bilinear", align_corners=False)


class Pyramid(nn.Module):
    """The backbone of a RetinaNet, and one convolution over all levels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        stage = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
        self.stages = nn.ModuleList(stage(8 << i, 16 << i) for i in range(3))
        self.pyramid = FeaturePyramidNetwork([16, 32, 64], 12)
        self.head = nn.Conv2d(12, 4, 3, padding=1)

    def forward(self, x):
        x, levels = self.stem(x), {}
        for i, stage in enumerate(self.stages):
            levels[str(i)] = x = stage(x)
        return torch.cat([self.head(level).flatten(2) for level in self.pyramid(levels).values()], 2)


def efficientnet():
    config = vision.efficientnet.MBConvConfig
    blocks = [config(1, 3, 1, 8, 8, 1, 1.0, 1.0), config(4, 3, 2, 8, 16, 2, 1.0, 1.0), config(4, 5, 2, 16, 24, 1, 1.0, 1.0)]
    return vision.EfficientNet(blocks, dropout=0.0, stochastic_depth_prob=0.0, num_classes=CLASSES, last_channel=32)


def regnet():
    blocks = vision.regnet.BlockParams([1, 1], [8, 16], [4, 8], [1.0, 1.0], [2, 2], 0.25)
    return vision.RegNet(blocks, num_classes=CLASSES, stem_width=8)


def convnext():
    block = vision.convnext.CNBlockConfig
    return vision.ConvNeXt([block(8, 16, 1), block(16, None, 2)], num_classes=CLASSES)


def mobilenet():
    return vision.MobileNetV2(CLASSES, 0.25, [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2]], 4, dropout=0.0)


def vgg():
    body = vision.vgg.make_layers([8, "M", 16, "M", 16, 16, "M"], True)
    return nn.Sequential(body, nn.Flatten(), nn.Linear(256, 16), nn.ReLU(True), nn.Linear(16, CLASSES))


def inception():
    kinds = vision.inception
    body = [nn.Conv2d(3, 16, 3), kinds.InceptionA(16, 8), kinds.InceptionC(232, 16), nn.Conv2d(768, 16, 1), kinds.InceptionE(16)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, CLASSES))


FAMILIES = {
    "gpt2": decoder("GPT2", "LMHeadModel", vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0),
    "llama": decoder("Llama", **WIDTHS, num_key_value_heads=2),
    "qwen2": decoder("Qwen2", **WIDTHS, num_key_value_heads=2),
    "gemma": decoder("Gemma", **WIDTHS, num_key_value_heads=1, head_dim=8),
    "phi": decoder("Phi", **WIDTHS, resid_pdrop=0.0, embd_pdrop=0.0),
    "opt": decoder("OPT", vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
                   max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0, pad_token_id=1),
    "gpt_neox": decoder("GPTNeoX", **WIDTHS, hidden_dropout=0.0, attention_dropout=0.0),
    "falcon": decoder("Falcon", vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "bloom": decoder("Bloom", vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    "mixtral": decoder("Mixtral", **WIDTHS, num_key_value_heads=2, num_local_experts=4, experts_implementation="batched_mm"),
    "bert": encoder("Bert", **WIDTHS, **NO_DROPOUT),
    "distilbert": encoder("DistilBert", vocab_size=WORDS, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=32,
                          dropout=0.0, attention_dropout=0.0),
    "electra": encoder("Electra", **WIDTHS, **NO_DROPOUT, embedding_size=16),
    "deberta": encoder("DebertaV2", **WIDTHS, **NO_DROPOUT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "albert": encoder("Albert", **WIDTHS, **NO_DROPOUT, embedding_size=16),
    "roberta": encoder("Roberta", "ForSequenceClassification", **WIDTHS, **NO_DROPOUT, pad_token_id=1),
    "t5": two_texts("T5", attn_implementation="eager", vocab_size=WORDS, d_model=64, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                    dropout_rate=0.0, decoder_start_token_id=0),
    "bart": two_texts("Bart", vocab_size=WORDS, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                      decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32, dropout=0.0,
                      pad_token_id=1),
    "clip": clip,
    "whisper": whisper,
    "wav2vec2": speech,
    "vit": image_encoder("ViT", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
                         patch_size=4, **NO_DROPOUT),
    "swin": image_encoder("Swin", attn_implementation="eager", image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                          window_size=4, drop_path_rate=0.0),
    "vit_vision": pixels(lambda: vision.VisionTransformer(16, 8, 2, 4, 32, 48, num_classes=CLASSES), 16),
    "swin_vision": pixels(lambda: vision.SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=CLASSES,
                                                         stochastic_depth_prob=0.0)),
    "convnext": pixels(convnext),
    "resnet": pixels(lambda: vision.ResNet(vision.resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=8), 64),
    "mobilenet": pixels(mobilenet),
    "efficientnet": pixels(efficientnet),
    "regnet": pixels(regnet),
    "shufflenet": pixels(lambda: vision.ShuffleNetV2([1, 2, 1], [8, 16, 24, 32, 48], num_classes=CLASSES)),
    "densenet": pixels(lambda: vision.DenseNet(4, (2, 2), 8, 2, num_classes=CLASSES)),
    "squeezenet": pixels(lambda: vision.squeezenet1_1(num_classes=CLASSES, dropout=0.0)),
    "vgg": pixels(vgg),
    "inception": pixels(inception, 16),
    "mnasnet": pixels(lambda: vision.MNASNet(0.25, num_classes=CLASSES, dropout=0.0), 64),
    "unet": pixels(UNet),
    "fcn": pixels(lambda: Segmenter(FCNHead)),
    "deeplab": pixels(lambda: Segmenter(DeepLabHead)),
    "pyramid": pixels(Pyramid),
    "lstm": recurrent(nn.LSTM),
    "lstm_deep": recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "gru": recurrent(nn.GRU),
    "dlrm": lambda: (First(Dlrm()), {"dense": torch.randn(BATCH, 6), "sparse": torch.randint(0, 11, (BATCH, 3))}),
    "resnet50": pixels(lambda: vision.resnet50(num_classes=10), 64),
}


def make(name):
    """The module in training mode with nothing dropped, and its inputs; always the same numbers."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    model.train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.momentum = 1 - torch.tensor(1 - part.momentum).item()  # as ONNX has it
    return model, inputs
