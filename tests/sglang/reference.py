"""Greedy answers of transformers: reference.py MODEL, prompts as JSON on stdin, answers as JSON on stdout.

In: {"tokens": n, "prompts": [[token]]}. Out: [[token]].
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main():
    """Answer all prompts."""
    asked = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    answers = []
    for prompt in asked["prompts"]:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked["tokens"], min_new_tokens=asked["tokens"],
                             do_sample=False, eos_token_id=None, pad_token_id=0)
        answers.append(out[0, len(prompt):].tolist())
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
