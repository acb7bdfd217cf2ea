"""The table of architectures: Hugging Face transformers' and the hand-written ones, as data."""

from tests.zoo.architecture import Architecture
from tests.zoo.handmade_rows import HANDMADE
from tests.zoo.transformers_rows import of_transformers

ARCHITECTURES: dict[str, Architecture] = of_transformers() | {
    each.case.name: each for each in HANDMADE
}
# One of each family: `make test` runs these, `make test-slow` all others.
FAST: tuple[str, ...] = (
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "MixtralForCausalLM",
    "MambaForCausalLM",
    "AlbertForMaskedLM",
    "BartForConditionalGeneration",
    "ResNetForImageClassification",
    "Wav2Vec2ForSequenceClassification",
    "SiglipModel",
    "LSTM, 2 layers, bidirectional, dropout",
    "buffers written and replaced in forward",
    "checkpoint, selective",
    "a parameter used under no_grad only",
)
