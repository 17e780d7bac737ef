"""A seeded random Llama small enough to be exact and quick: what the engine's tests run on."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Plain sentences of our own; the vocabulary is learnt from them, and bytes cover every other text.
TRAINING_TEXT = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "A residual stream carries what each decoder block adds to the token's vector.",
    "She counted one, two, three, four, five, six, seven, eight, nine, ten and then began again.",
    "Rain fell on the harbour all morning; by noon the boats had gone out anyway.",
    "To measure something well, decide first how wrong the answer is allowed to be.",
    "The children asked why the sky is blue, and why the grass is not.",
    "def add(left, right):\n    return left + right\n",
    "If the experiment fails, write down what you saw, not what you wanted to see.",
    "He was the first in his family to read the letters that his grandmother kept.",
    "It is 12:45 on 2026-01-31; the train leaves in 15 minutes from platform 9.",
    "Hot water freezes, they say, faster than cold; nobody in the room believed it.",
    "Many hands make light work, but too many cooks spoil the broth.",
    "The model predicts the next token from all the tokens that came before it.",
    "In winter the lake was so clear that we could see the stones at the bottom.",
    "What would you do if you had one more hour in every day of the week?",
    "Naïve café owners in Zürich and Łódź don't always agree about the price of coffee.",
)
BOS_TOKEN = "<s>"
EOS_TOKEN = "</s>"
VOCAB_SIZE = 640


def make_tiny_model(
    folder: Path,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    seed: int = 0,
) -> Path:
    """Write a 4-layer Llama (hidden 64, 2 heads of 32, context 512) with random weights and its tokenizer.

    The tokenizer is a byte-level BPE that adds a BOS. The same seed writes the same weights (rounded for
    `bfloat16` and `float16`). The weights are larger than an initialisation's, so that logits are far from flat and
    a changed residual stream changes the text. Returns `folder`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_train_tokenizer(), bos_token=BOS_TOKEN, eos_token=EOS_TOKEN)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=0.08)
            # Spread the logits: greedy decoding of nearly flat ones would hang on rounding.
            model.lm_head.weight.normal_(std=0.4)
            # An end token this unlikely keeps generations at the length that a test asks for.
            model.lm_head.weight[tokenizer.eos_token_id] = 0.0
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


def _train_tokenizer() -> "Tokenizer":
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A",
        pair=f"{BOS_TOKEN} $A {BOS_TOKEN} $B",
        special_tokens=[(BOS_TOKEN, tokenizer.token_to_id(BOS_TOKEN))],
    )
    return tokenizer
