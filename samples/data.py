"""Makes the committed data: real digits and text for the samples, small random sets (fixed seeds) for the test models.

    python samples/data.py                   # digits.npz and everything under tests/models/data
    python samples/data.py --text VERSES     # samples/gpt from the output of: bible -f "Gen1:1-Rev22:21"
"""

import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests/models/data"
EVAL_BYTES = 1 << 16


def digits():
    """scikit-learn's bundled 8x8 digits, intensities in [0, 1], in a fixed random order."""
    from sklearn.datasets import load_digits
    d = load_digits()
    order = np.random.default_rng(0).permutation(len(d.target))
    return {"image": (d.data[order] / 16).astype(np.float32), "labels": d.target[order].astype(np.int64)}


def text(verses):
    """The first books of the Bible, one verse a line without its reference, whole books up to 1.2 MB: text.txt; as
    byte tokens: tokens.npy (all but the end) and eval.npy (the last 64 KiB)."""
    out, book = b"", b""
    last = None
    for line in Path(verses).read_bytes().splitlines():
        name, verse = re.fullmatch(rb"(\d?[A-Za-z]+)\d+:\d+ (.*)", line).groups()
        if name != last and last is not None:
            if len(out) + len(book) > 1_200_000:
                break
            out, book = out + book, b""
        last, book = name, book + verse.strip() + b"\n"
    folder = ROOT / "samples/gpt"
    folder.joinpath("text.txt").write_bytes(out)
    tokens = np.frombuffer(out, np.uint8)
    np.save(folder / "tokens.npy", tokens[:-EVAL_BYTES])
    np.save(folder / "eval.npy", tokens[-EVAL_BYTES:])


def token_samples(rng, count, length, vocab):
    """Learnable sequences: the next token is mostly an affine function of the last; labels are the next tokens."""
    ids = np.empty((count, length + 1), np.int64)
    ids[:, 0] = rng.integers(0, vocab, count)
    for t in range(length):
        ids[:, t + 1] = np.where(rng.random(count) < 0.75, (ids[:, t] * 5 + 7) % vocab, rng.integers(0, vocab, count))
    return ids[:, :-1], ids[:, 1:].copy()


def ignore_some(rng, labels, share):
    """Sets a share of the labels to -100, unevenly over the samples: some samples have no label left."""
    mask = rng.random(labels.shape) < share
    mask[::7] = True
    return np.where(mask, -100, labels)


def test_data():
    """{file: arrays}, each a few steps' worth of samples."""
    rng = np.random.default_rng(1)
    full = digits()
    ids, labels = token_samples(rng, 320, 16, 211)
    masked = ignore_some(rng, labels, 0.3)
    bert_ids, _ = token_samples(rng, 128, 16, 211)
    lengths = rng.integers(8, 17, (128, 1))
    attention = (np.arange(16) < lengths).astype(np.int64)
    chosen = (rng.random(bert_ids.shape) < 0.25) & (attention == 1)
    masked_ids, bert_labels = np.where(chosen, 210, bert_ids), np.where(chosen, bert_ids, -100)
    segments = (np.arange(16) >= lengths // 2).astype(np.int64)
    a, b = rng.standard_normal((96, 12), np.float32), rng.standard_normal((96, 5), np.float32)
    basis = (rng.standard_normal((24, 24)) / 5).astype(np.float32)
    target = np.stack([a[:, 0] * b[:, 0], np.sin(a[:, 1] + b[:, 1]), a[:, 2:5].sum(1)], 1).astype(np.float32)
    steps = {"a": a.reshape(12, 8, 12), "b": b.reshape(12, 8, 5), "target": target.reshape(12, 8, 3),
             "basis": np.stack([basis * (1 + t / 20) for t in range(12)]).astype(np.float32)}
    zipf = np.minimum(rng.zipf(1.3, 2561) * 7919 % 50257, 50256)
    return family_data(full) | soft_data(full) | {
        "mlp.npz": {k: v[:256] for k, v in full.items()},
        "mlp_ignore.npz": {"image": full["image"][:256], "labels": ignore_some(rng, full["labels"][:256], 0.2)},
        "gpt2_tiny.npz": {"input_ids": ids, "labels": masked},
        "gpt2_tiny_next.npz": {"input_ids": ids[:160]},
        "gpt2_tiny_tokens.npy": np.concatenate([ids.reshape(-1), ids[0, :1]]).astype(np.uint8),
        "gpt2_50257_tokens.npy": zipf.astype(np.uint16),
        "bert_tiny.npz": {"input_ids": masked_ids, "attention_mask": attention, "token_type_ids": segments,
                          "labels": bert_labels},
        "two_inputs.npz": {"a": a, "b": b, "target": target},
        "two_inputs_bce.npz": {"a": a, "b": b, "target": (1 / (1 + np.exp(-2 * target))).astype(np.float32)},
        "two_inputs_basis.npy": basis,
        "two_inputs_steps.npz": steps,
    }


def family_data(full):
    """{file: arrays} for the graphs of `families.py`."""
    rng = np.random.default_rng(2)
    image = full["image"][:96]
    pixels = (image > 0.25).astype(np.int64) + (image > 0.75)
    dense, sparse = rng.standard_normal((96, 6), np.float32), np.stack([rng.integers(0, n, 96) for n in (11, 17, 23)], 1)
    click = (dense[:, 0] + sparse[:, 0] / 5 - 1 + dense[:, 1] * (sparse[:, 1] % 3) > 0).astype(np.float32)
    words = (full["labels"][:96, None] * 3 + rng.integers(0, 4, (96, 6))) % 31
    source = rng.integers(1, 61, (96, 12))
    mask = (np.arange(12) < rng.integers(6, 13, (96, 1))).astype(np.int64)
    answer = source[:, 6::-1]
    return {
        "pixels.npz": {"image": image, "labels": pixels.reshape(-1, 8, 8)},
        "images.npz": {"image": image, "target": image},
        "dlrm.npz": {"dense": dense, "sparse": sparse, "target": click[:, None]},
        "two_towers.npz": {"image": image, "text": words, "labels": np.tile(np.arange(16), 6)},
        "t5.npz": {"input_ids": source, "attention_mask": mask,
                   "decoder_input_ids": np.pad(answer[:, :-1], ((0, 0), (1, 0))), "labels": answer},
    }


def soft_data(full):
    """{file: arrays} whose labels are each class's share: mixed images, and pixels of which nothing is certain."""
    rng = np.random.default_rng(3)
    image, classes = full["image"][:256], np.eye(10)[full["labels"][:256]]
    other, share = rng.permutation(256), rng.beta(0.4, 0.4, (256, 1))
    mixed = [share * x + (1 - share) * x[other] for x in (image, classes)]
    scores = rng.standard_normal((48, 3, 8, 8)) + 4 * np.stack([image[:48] < 0.25, image[:48] > 0.25, image[:48] > 0.75], 1).reshape(48, 3, 8, 8)
    odds = np.exp(scores)
    return {
        "mlp_shares.npz": {"image": mixed[0].astype(np.float32), "labels": mixed[1].astype(np.float32)},
        "pixels_shares.npz": {"image": image[:48], "labels": (odds / odds.sum(1, keepdims=True)).astype(np.float32)},
    }


def main():
    if sys.argv[1:2] == ["--text"]:
        return text(sys.argv[2])
    np.savez(ROOT / "samples/mlp/digits.npz", **digits())
    TESTS.mkdir(parents=True, exist_ok=True)
    for file, arrays in test_data().items():
        if isinstance(arrays, dict):
            small = {k: v.astype(np.int16) if v.dtype == np.int64 else v for k, v in arrays.items()}
            np.savez(TESTS / file, **small)
        else:
            np.save(TESTS / file, arrays)


if __name__ == "__main__":
    main()
