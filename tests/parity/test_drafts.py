"""Drafts in their published layouts compute what the papers say, whole, chunked and decoding, in both executors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import drafts
from helpers.backends import BACKENDS, NATIVE, Backend
from helpers.checkpoints import LENGTH, VOCAB, random_tokens, tiny_model
from helpers.golden import MakeGolden
from helpers.pairs import pairwise
from helpers.runs import CHUNKS, DECODE, LIMITS, WHOLE, Steps
from helpers.specs import BF16, F32, I8
from helpers.stepper import Stepper
from quire.executor.base import Executor
from quire.executor.native import NativeExecutor
from quire.executor.torch import TorchExecutor
from quire.loader import Checkpoint, LoadRules, load
from quire.loader.draft_checkpoint import draft_file, draft_ids, draft_rules
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.lower_draft import lower_draft, lower_medusa, module_count, trimmed
from quire.spec.draft import DraftSpec, Features, MedusaSpec
from quire.spec.draft_config import mtp_draft, read_draft
from quire.spec.facts import read_model

TARGET = "smollm3"  # four layers, untied
STEPS = {"whole": WHOLE, "chunks": CHUNKS, "decode": DECODE}
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)
Rows = np.ndarray[Any, np.dtype[np.float32]]


def target_executor(
    backend: Backend, folder: Path, formats: NumberFormats = F32, features: Any = None
) -> Executor:
    spec = read_model(folder).spec
    executor = backend.make(lower(spec, formats, features=features))
    with Checkpoint(folder) as source:
        load(executor.program.params, source, executor, rules=LoadRules.of(spec))
    return executor


def beside(
    target: Executor, spec: DraftSpec | MedusaSpec, folder: Path, formats: NumberFormats = F32, count: int = 0
) -> Executor:
    """The draft of a folder in an executor that borrows from the target's; logits of `count` tokens, 0 for all."""
    if isinstance(spec, MedusaSpec):
        program = lower_medusa(spec, formats, target.program, count)
    else:
        program = trimmed(lower_draft(spec, formats, target.program), count or VOCAB)
    executor: Executor
    if isinstance(target, NativeExecutor):
        executor = NativeExecutor(program, threads=1, beside=target)
    else:
        assert isinstance(target, TorchExecutor)
        executor = TorchExecutor(program, beside=target)
    with Checkpoint(folder, draft_file(folder)) as source:
        load(program.params, source, executor, rules=draft_rules(spec))
    return executor


class Driver:
    """Runs a draft over one sequence: the tokens of random_tokens(0) with some features."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.stepper = executor, Stepper(executor.program, LIMITS, seed=1)
        executor.bind(LIMITS, self.stepper.arrays)
        self.number = self.stepper.add(random_tokens(0))
        self.done = 0
        program = executor.program
        several = module_count(program) > 1
        self.modules = [*(x.first_op for x in program.inputs), len(program.body)] if several else []

    def step(self, count: int, rows: Rows, name: str = "features") -> drafts.Passed:
        size = self.stepper.fill({self.number: count})
        given = next(x for x in self.executor.program.inputs if x.name == name)
        self.executor.write(given.buffer, rows)
        logits, hidden = [], []
        for token in range(count):
            self.stepper.arrays.logit_rows[0] = token
            if token:
                made = self.executor.run_head(1)
            elif not self.modules:
                made = self.executor.run(size.num_tokens, 1, 1, given.first_op)
            else:
                end = min(begin for begin in self.modules if begin > given.first_op)
                self.executor.run_range(size.num_tokens, 1, 1, given.first_op, end)
                made = self.executor.run_head(1)
            logits.append(torch.tensor(made["logits"]))
            hidden.append(torch.tensor(made["hidden"][token if self.modules else 0])[None])
        return drafts.Passed(torch.cat(logits), torch.cat(hidden))

    def steps(self, steps: Steps, rows: Rows) -> drafts.Passed:
        found, at = [], 0
        for counts in steps:
            found.append(self.step(counts[0], rows[at : at + counts[0]]))
            at += counts[0]
        return drafts.Passed(torch.cat([x.logits for x in found]), torch.cat([x.hidden for x in found]))


def random_features(cols: int, rows: int = LENGTH) -> Rows:
    return np.random.default_rng(5).standard_normal((rows, cols)).astype(np.float32)


def close(found: drafts.Passed, wanted: drafts.Passed, tolerance: float) -> None:
    assert wanted.logits.abs().max() > 1
    for one, other in ((found.logits, wanted.logits), (found.hidden, wanted.hidden)):
        assert (one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


MTP_MODELS = ["deepseek3", "glm4-moe"]
METHODS: dict[str, tuple[Callable[..., Path], drafts.Definition, int]] = {
    "eagle": (drafts.write_eagle, drafts.eagle, 1),
    "eagle3": (drafts.write_eagle3, drafts.eagle3, 3),
}


@pytest.mark.parametrize(("method", "backend", "steps"), pairwise([*METHODS], BACKENDS, [*STEPS]))
def test_a_draft_computes_what_its_paper_says(
    method: str, backend: Backend, steps: str, golden: MakeGolden, tmp_path: Path
) -> None:
    """And once more with its own rows for the features of the last token, as for the second draft of a chain."""
    write, definition, width = METHODS[method]
    folder, reference = write(tmp_path / method), golden(tiny_model(TARGET))
    spec = read_draft(folder, method, read_model(reference.folder).spec)
    target = target_executor(backend, reference.folder)
    driver = Driver(beside(target, spec, folder))
    tokens, features = torch.tensor(random_tokens(0)), torch.tensor(random_features(width * drafts.DIM))
    weights = drafts.tensors(folder)
    wanted = definition(weights, reference.model.state_dict(), tokens, features)
    found = driver.steps(STEPS[steps], features.numpy())
    close(found, wanted, backend.tolerance)


@every_backend
@pytest.mark.parametrize("method", METHODS)
def test_a_draft_goes_on_from_its_own_rows(
    method: str, backend: Backend, golden: MakeGolden, tmp_path: Path
) -> None:
    write, definition, width = METHODS[method]
    folder, reference = write(tmp_path / method), golden(tiny_model(TARGET))
    spec = read_draft(folder, method, read_model(reference.folder).spec)
    driver = Driver(beside(target_executor(backend, reference.folder), spec, folder))
    tokens, cut = torch.tensor(random_tokens(0)), LENGTH - 1
    features = torch.tensor(random_features(width * drafts.DIM))
    weights, own = drafts.tensors(folder), reference.model.state_dict()
    before = definition(weights, own, tokens[:cut], features[:cut])
    if width > 1:  # what the draft's own rows stand in for
        features = features @ weights["fc.weight"].T
    features[cut] = before.hidden[-1]
    wanted = definition(weights, own, tokens, features)
    first = driver.step(cut, random_features(width * drafts.DIM)[:cut])
    close(first, before, backend.tolerance)
    last = driver.step(1, first.hidden[-1:].numpy(), "hidden")
    close(last, drafts.Passed(wanted.logits[-1:], wanted.hidden[-1:]), 2 * backend.tolerance)


@pytest.mark.parametrize(("model", "backend", "steps"), pairwise(MTP_MODELS, BACKENDS, [*STEPS]))
def test_an_mtp_layer_computes_what_its_paper_says(
    model: str, backend: Backend, steps: str, golden: MakeGolden, tmp_path: Path
) -> None:
    """From the checkpoint of the model, which loads as before."""
    reference = golden(tiny_model(model))
    (layer,) = drafts.write_mtp(tmp_path / "model", reference.model, reference.folder)
    folder = tmp_path / "model"
    spec = mtp_draft(read_model(folder).spec)
    driver = Driver(beside(target_executor(backend, folder), spec, folder))
    tokens, features = torch.tensor(random_tokens(0)), torch.tensor(random_features(drafts.DIM))
    wanted = drafts.mtp(layer, reference.model, drafts.tensors(folder), tokens, features)
    close(driver.steps(STEPS[steps], features.numpy()), wanted, backend.tolerance)


@every_backend
def test_each_mtp_module_computes_with_its_own_weights(
    backend: Backend, golden: MakeGolden, tmp_path: Path
) -> None:
    reference = golden(tiny_model("deepseek3"))
    layers = drafts.write_mtp(tmp_path / "model", reference.model, reference.folder, 2)
    folder = tmp_path / "model"
    target = target_executor(backend, folder)
    spec = mtp_draft(read_model(folder).spec)
    tokens, features = torch.tensor(random_tokens(0)), torch.tensor(random_features(drafts.DIM))
    weights = drafts.tensors(folder)
    for module, (layer, name) in enumerate(zip(layers, ("features", "hidden.1"), strict=True)):
        found = Driver(beside(target, spec, folder)).step(LENGTH, features.numpy(), name)
        close(
            found,
            drafts.mtp(layer, reference.model, weights, tokens, features, module),
            backend.tolerance,
        )


def test_ids_of_a_draft_vocabulary(golden: MakeGolden, tmp_path: Path) -> None:
    folder, target = (
        drafts.write_eagle3(tmp_path / "draft"),
        read_model(golden(tiny_model(TARGET)).folder).spec,
    )
    spec = read_draft(folder, "eagle3", target)
    assert isinstance(spec, DraftSpec)
    with Checkpoint(folder) as source:
        ids = draft_ids(source, spec)
    assert ids is not None
    kept = drafts.tensors(folder)["t2d"].nonzero().flatten()
    np.testing.assert_array_equal(ids, kept.numpy())


@every_backend
@pytest.mark.parametrize("own_head", [True, False], ids=["own heads", "target's head"])
def test_medusa_heads_compute_what_their_paper_says(
    own_head: bool, backend: Backend, golden: MakeGolden, tmp_path: Path
) -> None:
    reference = golden(tiny_model(TARGET))
    folder = drafts.write_medusa(tmp_path / "heads", **({} if own_head else {"original_lm_head": True}))
    spec = read_draft(folder, "medusa", read_model(reference.folder).spec)
    executor = beside(target_executor(backend, reference.folder), spec, folder)
    features = random_features(drafts.DIM, 5)
    found = medusa_logits(executor, features)
    wanted = drafts.medusa(drafts.tensors(folder), reference.model.state_dict(), torch.tensor(features))
    assert wanted.abs().max() > 1
    assert (found - wanted).abs().max() <= backend.tolerance * float(wanted.abs().max())
    assert executor.memory()["kv"] == 0


@every_backend
def test_features_are_the_targets(backend: Backend, golden: MakeGolden) -> None:
    """The residual stream before layers, and the last row after the norm. The logits are those without, bit for bit."""
    reference = golden(tiny_model(TARGET))
    spec = read_model(reference.folder).spec
    with torch.inference_mode():
        ids = torch.tensor([random_tokens(0)])
        hidden = reference.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    last = len(spec.layers)
    logits = []
    for features, wanted in (
        (None, []),
        (Features((0, 2, 3)), [hidden[0], hidden[2], hidden[3]]),
        (Features(), [hidden[last]]),
    ):
        executor = target_executor(backend, reference.folder, F32, features)
        stepper = Stepper(executor.program, LIMITS)
        executor.bind(LIMITS, stepper.arrays)
        stepper.add(random_tokens(0))
        size = stepper.fill({0: LENGTH})
        made = executor.run(size.num_tokens, 1, 1)
        logits.append(made["logits"].copy())
        for number, rows in enumerate(wanted):
            name = "features" if len(wanted) == 1 else f"features.{number}"
            assert np.abs(made[name] - rows[0].numpy()).max() <= backend.tolerance * float(rows.abs().max())
    for found in logits[1:]:
        np.testing.assert_array_equal(found, logits[0])


TRIMMED = {
    "bf16": BF16,
    "i8": replace(F32, head=I8),
    "i4": replace(F32, head=WeightFormat("i4", Groups(32))),
}


@pytest.mark.parametrize("formats", TRIMMED)
def test_the_first_tokens_of_a_vocabulary_have_the_logits_of_all(
    formats: str, golden: MakeGolden, tmp_path: Path
) -> None:
    """Bit for bit, from the target's packed head, which is held once."""
    reference, form = golden(tiny_model(TARGET)), TRIMMED[formats]
    target = target_executor(NATIVE, reference.folder, form)
    folder = drafts.write_eagle(tmp_path / "draft")
    spec = read_draft(folder, "eagle", read_model(reference.folder).spec)
    features = random_features(drafts.DIM)
    whole = Driver(beside(target, spec, folder, form)).step(5, features[:5])
    for count in (100, 64, 1):
        driver = Driver(beside(target, spec, folder, form, count))
        assert torch.equal(driver.step(5, features[:5]).logits, whole.logits[:, :count])
        assert "head" not in {param.name for param in driver.executor.program.params}


def medusa_logits(executor: Executor, features: Rows) -> torch.Tensor:
    """Logits [rows, heads, vocabulary]."""
    arrays, count = Stepper(executor.program, LIMITS).arrays, len(features)
    executor.bind(LIMITS, arrays)
    arrays.query_start[: count + 1] = range(count + 1)
    executor.write("features", features)
    return torch.tensor(executor.run(count, count, 0)["logits"]).unflatten(-1, (3, -1))


def test_the_first_tokens_of_a_vocabulary_have_the_logits_of_all_in_heads(
    golden: MakeGolden, tmp_path: Path
) -> None:
    reference, features = golden(tiny_model(TARGET)), random_features(drafts.DIM, 5)
    folder = drafts.write_medusa(tmp_path / "heads", original_lm_head=True)
    spec, target = (
        read_draft(folder, "medusa", read_model(reference.folder).spec),
        target_executor(NATIVE, reference.folder),
    )
    whole, some = (medusa_logits(beside(target, spec, folder, F32, count), features) for count in (0, 70))
    assert torch.equal(some, whole[..., :70])
