"""Greedy answers of transformers, as long as the one that asks lives: reference.py, calls on stdin, answers on stdout, each a line of JSON.

A call: {"model": folder, "tokens": n, "prompts": [[token]]}. Its answer: [[token]].
"""

import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM


def answers(model, prompts, tokens):
    """Answer prompts one after another."""
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                             do_sample=False, eos_token_id=None, pad_token_id=0)
        yield out[0, len(prompt):].tolist()


def main():
    """Answer calls until the end of stdin."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints goes to the log
    folder, model = "", None
    for line in sys.stdin:
        call = json.loads(line)
        if call["model"] != folder:
            folder, model = call["model"], AutoModelForCausalLM.from_pretrained(call["model"], dtype=torch.float32)
        out.write(json.dumps(list(answers(model, call["prompts"], call["tokens"]))) + "\n")


if __name__ == "__main__":
    main()
