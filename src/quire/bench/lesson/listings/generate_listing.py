"""The loop of inference in plain numpy, on the bundled model: the whole sequence is computed for every token."""

from quire.config.shipped import DEFAULT_MODEL, shipped_models
from quire.reference.decoder import Transformer, generate
from quire.text.tokenizer import Tokenizer


def main() -> None:
    folder = shipped_models()[DEFAULT_MODEL]
    tokenizer, model = Tokenizer.from_dir(folder), Transformer(folder)
    begun = "The quick brown"
    prompt = tokenizer.encode(begun)
    ids = generate(model, prompt, 4, temperature=0)  # the likeliest token; no division by a temperature of 0
    print(begun + tokenizer.decode(ids))
    print("the same again:", generate(model, prompt, 4, temperature=0) == ids)
    for seed in (1, 2):
        print("drawn:", tokenizer.decode(generate(model, prompt, 1, top_p=0.9, seed=seed)))
