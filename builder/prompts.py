"""Token sequences for checking an engine: ordinary text, and random tokens that reach all of the vocabulary."""

from __future__ import annotations

import pathlib

import numpy as np

from .checkpoint import Checkpoint

_TEXTS = (
    "The lighthouse keeper counted the ships each evening. Tonight there were seven, one more than yesterday, and the "
    "extra one carried no flag. She wrote its position into the log, lit the lamp, and waited for a signal.",
    "Q: A train leaves at 9:40 and arrives at 13:05. How long is the journey?\nA: From 9:40 to 13:05 it is three "
    "hours and twenty-five minutes.\nQ: And if it is twelve minutes late?\nA:",
    "def moving_average(values, width):\n    total = 0.0\n    result = []\n    for i, value in enumerate(values):\n"
    "        total += value\n        if i >= width:\n            total -= values[i - width]\n",
    "Wer im Gebirge wandert, sollte früh aufbrechen: Am Nachmittag ziehen oft Gewitter auf. 山の天気は変わりやすい。",
)


def make_sequences(checkpoint: Checkpoint, count: int, max_length: int, seed: int) -> list[list[int]]:
    """Return `count` sequences of 1 to max_length token ids: texts first, the other half random tokens.

    The same arguments give the same sequences.
    """
    rng = np.random.default_rng(seed)
    texts = _encode(checkpoint, (count + 1) // 2)
    sequences = [ids[:max_length] for ids in texts if ids]
    while len(sequences) < count:
        length = int(rng.integers(1, max_length + 1))
        sequences.append(rng.integers(0, checkpoint.spec.vocab_size, length).tolist())
    return sequences


def _encode(checkpoint: Checkpoint, count: int) -> list[list[int]]:
    from tokenizers import Tokenizer

    content = checkpoint.tokenizer_files()["tokenizer.json"]
    data = content.read_bytes() if isinstance(content, pathlib.Path) else content
    tokenizer = Tokenizer.from_str(data.decode())
    # Text beyond the first few repeats, shifted, so that any count gives different sequences.
    texts = [_TEXTS[n % len(_TEXTS)][n // len(_TEXTS) :] for n in range(count)]
    return [list(tokenizer.encode(text).ids) for text in texts]
