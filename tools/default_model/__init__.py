"""Builds the small chat model that ships with Quire: text generator, tokenizer, trainer, evaluation."""
