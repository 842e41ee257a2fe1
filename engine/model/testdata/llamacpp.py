"""Records what llama.cpp answers: greedy tokens with top log-probabilities, and token ids of texts.

Run from the repository root, in a virtual environment with xllamacpp (a wheel of llama.cpp) installed:
    python engine/model/testdata/llamacpp.py .deps/model/SmolLM2-135M-Instruct.Q4_1.gguf
It rewrites engine/model/testdata/llamacpp.json and engine/tokenizer/testdata/llamacpp.json.
"""

import hashlib
import importlib.metadata
import json
import sys
import urllib.request

import xllamacpp

PROMPTS = [
    "The capital of France is Paris. The capital of Italy is",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
]
TEXTS = PROMPTS + [
    "", " ", "a", "  two  spaces ", "tabs\tand\n\nnew\r\nlines \n ", "don't we'll I'd you've they're it's I'm",
    "3.14159 and 1,000,000 in 2024", "a1b22c333 4 55", "x  1   2\n3", "Grüße, naïve café", "日本語のテキスト", "emoji 👩‍👩‍👧 🎉",
    "العربية עברית", "½ ² ① Ⅷ ٣", "snake_case camelCase __init__", "!!!??? ... --- <>", "\u00a0nbsp\u2003em",
    "https://example.org/a?b=c&d=%20", "if (x<=10) { y += 2*x; } // ok", "<|im_start|>x<|im_end|><|endoftext|>", "<|im_start", "ß" * 20,
]
POSITIONS, TOP = 32, 10


def post(server, path, body):
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def main():
    path = sys.argv[1]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    server = xllamacpp.Server(params)
    with open(path, "rb") as f:
        digest = hashlib.sha256(f.read()).hexdigest()
    head = {"source": "llama.cpp through the xllamacpp wheel, engine/model/testdata/llamacpp.py",
            "version": importlib.metadata.version("xllamacpp"), "build": str(xllamacpp.BUILD_INFO), "model_sha256": digest}

    def tokenize(text, special):
        return post(server, "/tokenize", {"content": text, "add_special": True, "parse_special": special})["tokens"]

    runs = []
    for prompt in PROMPTS:
        tokens = tokenize(prompt, True)
        answer = post(server, "/completion", {"prompt": tokens, "n_predict": POSITIONS, "temperature": 0, "n_probs": TOP,
                                              "cache_prompt": False, "ignore_eos": True, "seed": 1})
        steps = [{"token": p["id"], "logprob": round(p["logprob"], 4),
                  "top": [{"token": t["id"], "logprob": round(t["logprob"], 4)} for t in p["top_logprobs"]]}
                 for p in answer["completion_probabilities"]]
        assert len(steps) == POSITIONS, len(steps)
        runs.append({"prompt": prompt, "prompt_tokens": tokens, "steps": steps})
    with open("engine/model/testdata/llamacpp.json", "w") as f:
        json.dump(head | {"runs": runs}, f, indent=1, ensure_ascii=False)
        f.write("\n")
    texts = [{"text": t, "special": tokenize(t, True), "plain": tokenize(t, False)} for t in TEXTS]
    with open("engine/tokenizer/testdata/llamacpp.json", "w") as f:
        json.dump(head | {"texts": texts}, f, ensure_ascii=False, indent=1)
        f.write("\n")


main()
