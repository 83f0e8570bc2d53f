"""Byte-level BPE tokenizer of the tiny checkpoint, trained on the generated word problems."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from headfit.assets.word_problems import few_shot_prompt, make_problems

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
# A digit and a newline are always tokens of their own, so a prompt encodes the same whole or in pieces.
PIECES = r"\d|\n| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\nAnswer:' }}"
    "{% else %}{{ ' ' + message['content'] + '\n\n' }}"
    "{% endif %}{% endfor %}"
)


def build_tokenizer(vocab_size: int, seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on generated problems; all 256 bytes are in the vocabulary, so any text encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    problems = make_problems(20_000, seed)
    tokenizer.train_from_iterator((f"{few_shot_prompt(p, [])} {p.solution}\n\n" for p in problems), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
