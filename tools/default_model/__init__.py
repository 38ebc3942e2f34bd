"""Builds the small chat model that ships with Quire: text generator, tokenizer, trainer, evaluation."""

import os

# Threads sleep while they wait for each other. Read when torch is loaded, so it stands before that: beside other work,
# threads that wait busily for one that was put off take more time than they compute (30 times the step, when tried).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
