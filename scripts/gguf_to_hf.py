"""Writes a GGUF model as a Hugging Face folder with float32 weights: gguf_to_hf.py MODEL.gguf FOLDER.

For models of the llama architecture with a byte-level BPE vocabulary, which is what the demo model
is. Packed weights are unpacked, so an engine computes with exactly the numbers that the file stands for.
"""

import json
import pathlib
import sys

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

IN_LAYER = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
            "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3  # type of tokens that stand for themselves


def name(tensor):
    """The name of a tensor in Hugging Face's checkpoints."""
    parts = tensor.removesuffix(".weight").split(".")
    base = OUTSIDE[parts[0]] if len(parts) == 1 else f"model.layers.{parts[1]}.{IN_LAYER[parts[2]]}"
    return base + ".weight"


def weights(reader, heads):
    """All tensors as float32; GGUF interleaves the halves of rotary queries and keys, which is undone."""
    out = {}
    for tensor in reader.tensors:
        w = dequantize(tensor.data, tensor.tensor_type)
        for part, n in heads.items():
            if f".{part}." in tensor.name:
                w = w.reshape(n, w.shape[0] // n // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
        out[name(tensor.name)] = torch.from_numpy(w.copy()).to(torch.float32).contiguous()
    return out


def config(kv, tied):
    """config.json."""
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "float32",
            "hidden_size": kv["llama.embedding_length"], "intermediate_size": kv["llama.feed_forward_length"],
            "num_hidden_layers": kv["llama.block_count"], "num_attention_heads": kv["llama.attention.head_count"],
            "num_key_value_heads": kv["llama.attention.head_count_kv"], "vocab_size": kv["llama.vocab_size"],
            "rms_norm_eps": kv["llama.attention.layer_norm_rms_epsilon"], "rope_theta": kv["llama.rope.freq_base"],
            "max_position_embeddings": kv["llama.context_length"], "tie_word_embeddings": tied,
            "bos_token_id": kv["tokenizer.ggml.bos_token_id"], "eos_token_id": kv["tokenizer.ggml.eos_token_id"]}


def tokenizer(kv):
    """tokenizer.json: digits apart, then bytes."""
    tokens, types = kv["tokenizer.ggml.tokens"], kv["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in kv["tokenizer.ggml.merges"]]
    out = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    out.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    out.decoder = decoders.ByteLevel()
    out.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, types) if kind == CONTROL])
    return out


def tokenizer_config(kv):
    """tokenizer_config.json."""
    tokens = kv["tokenizer.ggml.tokens"]
    return {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokens[kv["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[kv["tokenizer.ggml.eos_token_id"]], "pad_token": tokens[kv["tokenizer.ggml.padding_token_id"]],
            "clean_up_tokenization_spaces": False, "model_max_length": kv["llama.context_length"],
            "chat_template": kv["tokenizer.chat_template"]}


def main(source, folder):
    """Convert one file."""
    reader = GGUFReader(source)
    kv = {key: field.contents() for key, field in reader.fields.items()}
    if kv["general.architecture"] != "llama" or kv["tokenizer.ggml.model"] != "gpt2":
        sys.exit(f"{source}: want a llama model with a gpt2 tokenizer")
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weights(reader, {"attn_q": kv["llama.attention.head_count"], "attn_k": kv["llama.attention.head_count_kv"]})
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer(kv).save(str(folder / "tokenizer.json"))
    for file, data in ("tokenizer_config.json", tokenizer_config(kv)), ("config.json", config(kv, "lm_head.weight" not in tensors)):
        (folder / file).write_text(json.dumps(data, indent=1), encoding="utf-8")
    print(f"{len(tensors)} tensors, {sum(t.numel() for t in tensors.values()):,} parameters")


if __name__ == "__main__":
    main(*sys.argv[1:])
