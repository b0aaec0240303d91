"""Makes the folder of a tiny causal language model that real vLLM serves on a CPU.

Runs inside the vLLM venv (`tokenizers`, `torch` and `safetensors` come with vLLM) and needs no network: the
tokenizer is learned from Python's own library, the weights are random under a fixed seed. The model says
nothing of use; what counts is that vLLM tokenizes, prefills and caches for it as it does for a large one.

    python tiny_model.py FOLDER
"""

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCABULARY = 2048
POSITIONS = 65536
HIDDEN, INTERMEDIATE, LAYERS = 64, 128, 2
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 32
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TRAINING_CHARACTERS = 2_000_000  # enough for 2048 merges to settle; one second of training

# ChatML as Qwen models write it: tools first, then the turns; a turn's content is text or a list of parts.
TEMPLATE = """\
{%- if tools %}
<|im_start|>system
# Tools
{%- for tool in tools %}

{{ tool | tojson }}
{%- endfor %}
<|im_end|>
{% endif %}
{%- for message in messages %}
<|im_start|>{{ message.role }}
{% if message.content is string %}
{{- message.content }}
{%- elif message.content %}
{%- for part in message.content if part.type == 'text' %}
{{- part.text }}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}

<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


def make_model(folder: Path) -> None:
    """Writes tokenizer, configuration and weights into `folder`; the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": POSITIONS,
            "eos_token": END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
    )
    write_json(folder / "config.json", describe_model(tokenizer.get_vocab_size(), end))
    write_json(folder / "generation_config.json", {"eos_token_id": end, "do_sample": False})
    weights = draw_weights(tokenizer.get_vocab_size())
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def train_tokenizer() -> Tokenizer:
    """Learns a byte-level BPE: every byte is in its alphabet, so no text is unknown to it."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_library(), trainer)
    return tokenizer


def read_library() -> Iterator[str]:
    """Yields the sources of Python's standard library, in order of their names."""
    left = TRAINING_CHARACTERS
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = source.read_text("utf-8", errors="replace")
        yield text
        left -= len(text)
        if left <= 0:
            return


def describe_model(vocabulary: int, end: int) -> dict[str, object]:
    """Returns config.json's content: a dense Qwen3 as vLLM reads it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": end,
    }


def draw_weights(vocabulary: int) -> dict[str, torch.Tensor]:
    """Draws every weight the checkpoint names: ones for norms, seeded small noise for matrices."""
    shapes = {"model.embed_tokens.weight": (vocabulary, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in layer_shapes().items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    noise = torch.Generator().manual_seed(20)
    return {
        name: (torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape, generator=noise)).bfloat16()
        for name, shape in shapes.items()
    }


def layer_shapes() -> dict[str, tuple[int, ...]]:
    """Returns one layer's weights by name, shaped (out, in) as torch keeps them."""
    return {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    """Writes `content` indented, with a last newline."""
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: tiny_model.py FOLDER")
    make_model(Path(sys.argv[1]))
