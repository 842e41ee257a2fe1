"""Prompts made of the repository's own texts, cut to given numbers of tokens."""

import random

LENGTHS = [256, 320, 400, 512, 600, 700, 800, 900, 1024, 1150, 1250, 1350]
TEXTS = ["LICENSE", "docs/spec/README.md", "docs/other-languages.md", "README.md", "docs/benchmarks.md", "docs/spec/vllm-invariants.md"]


def book(root, model):
    """The tokens of all texts, one list a text."""
    from tokenizers import Tokenizer  # only runs need it, run.py --list does not

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [tokenizer.encode((root / path).read_text(encoding="utf-8")).ids for path in TEXTS]


class Prompts:
    """Cuts prompts; equal seeds cut equal ones from equal texts."""

    def __init__(self, root, model, seed):
        self.texts, self.seed = book(root, model), seed

    def cut(self, name, tokens):
        """A prompt of so many tokens; no two names give prompts with a common first block."""
        rng = random.Random(f"{self.seed} {name}")
        head = [rng.randrange(1000, 40000) for _ in range(8)]
        out = head
        while len(out) < tokens:
            text = self.texts[rng.randrange(len(self.texts))]
            start = rng.randrange(max(1, len(text) - tokens // 2))
            out = out + text[start:start + tokens - len(out)]
        return out[:tokens]

    def set(self, name, lengths):
        """One prompt of each length."""
        return [self.cut(f"{name} {i}", n) for i, n in enumerate(lengths)]
