"""The training model against transformers, its cache against itself, and runs that stop and go on."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tools.default_model import average, build, hf_folder, lora, wiring
from tools.default_model import tokenizer as tokenizers
from tools.default_model.backends import BACKENDS
from tools.default_model.batching import IGNORE, Batches, BatchPlan, encode, repeats
from tools.default_model.corpus.conversation import Conversation, assistant, system, user
from tools.default_model.corpus.draw import Draw, Split
from tools.default_model.corpus.mixture import conversation
from tools.default_model.evaluate import (
    collect,
    domain_losses,
    items_of,
    perplexity_table,
    run,
    stop_ids,
    tables,
)
from tools.default_model.growth import grown
from tools.default_model.model import Cache, Decoder
from tools.default_model.optimizer import Muon, Schedule
from tools.default_model.shape import DRAFT, MINI, TOY, Shape, shape_from_config
from tools.default_model.train import Options, Trainer
from transformers import AutoModelForCausalLM

from quire.text.gguf_tokenizer_out import tokenizer_metadata


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A saved toy model with random weights."""
    made = tmp_path_factory.mktemp("toy")
    model = Decoder(TOY)
    wiring.initialize(model, torch.Generator().manual_seed(5))
    for weight in model.parameters():
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5, generator=torch.Generator().manual_seed(6))
    hf_folder.save(model, made, tokenizer_folder)
    return made


def test_transformers_gives_equal_logits(folder: Path) -> None:
    ours = hf_folder.load(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, TOY.vocab, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mine = ours.logits(ours(ids.reshape(-1), [(2, 40)])).view(2, 40, -1)
        reference = theirs(ids).logits
    torch.testing.assert_close(mine, reference, atol=2e-5, rtol=1e-5)
    assert theirs.config.tie_word_embeddings
    assert sum(p.numel() for p in theirs.parameters()) == TOY.parameters


def test_shapes_are_as_documented() -> None:
    assert 5_000_000 <= MINI.parameters <= 10_000_000
    assert DRAFT.parameters < 1_000_000
    assert MINI.vocab == DRAFT.vocab
    assert shape_from_config(MINI.config(1, 0)) == MINI
    with pytest.raises(ValueError, match="kv_heads"):
        replace(MINI, kv_heads=3)
    with pytest.raises(ValueError, match="hidden"):
        replace(MINI, hidden=100)


def test_documents_do_not_see_each_other() -> None:
    model = _random(TOY)
    ids = torch.arange(60) + 7
    with torch.no_grad():
        packed = model(ids, [(2, 20), (1, 20)])
        alone = torch.cat([model(part, [(1, 20)]) for part in ids.split(20)])
    torch.testing.assert_close(packed, alone)
    with torch.no_grad():
        some = model(ids, [(2, 20), (1, 20)], torch.tensor([3, 59]))
    torch.testing.assert_close(some, packed[[3, 59]])


def test_cached_steps_equal_the_whole() -> None:
    model = _random(TOY)
    ids = torch.randint(0, 500, (2, 12), generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([4, 7])
    with torch.no_grad():
        whole = model(ids.reshape(-1), [(2, 12)]).view(2, 12, -1)
        cache = Cache.empty(TOY, 2, 12, torch.device("cpu"))
        model.prefill(ids[:, :7], cache)
        for i in range(4):
            at = lengths + i
            hidden = model.step(ids[torch.arange(2), at], at, cache)
            torch.testing.assert_close(hidden, whole[torch.arange(2), at], atol=1e-5, rtol=1e-5)


def test_backends_agree(folder: Path) -> None:
    tokenizer = tokenizers.load(folder)
    prompts = [tokenizer.encode(i.prompt).ids for i in collect(1)[:6]]
    made = {name: backend(folder, stop_ids(tokenizer))(prompts, 12) for name, backend in BACKENDS.items()}
    assert made["quire"] == made["torch"] == made["transformers"]


def test_evaluation_of_the_right_answers_is_perfect(folder: Path) -> None:
    tokenizer = tokenizers.load(folder)
    items = collect(4)
    expected = [tokenizer.encode(i.expected).ids for i in items]
    graded = run(items, lambda prompts, limit: expected, tokenizer)
    assert all(g.grade.right for g in graded)
    assert "| tools |" in tables(graded)
    assert "100.0 %" in tables(graded)
    assert "| stories |" in perplexity_table(domain_losses(folder, tokenizer, 3))


def test_every_target_of_the_conversations_is_in_some_step(tokenizer_folder: Path) -> None:
    tokenizer = tokenizers.load(tokenizer_folder)
    plan = BatchPlan(seed=1, pool=40, steps_per_pool=3, group_tokens=500, micro_tokens=1500, max_length=2048)
    made = [conversation(1, Split.TRAIN, i) for i in range(40)]
    batches = Batches(made.__getitem__, tokenizer, plan)
    parts = [b for step in range(3) for b in batches.step(step)]
    wanted = sum(len(tokenizer.encode(i.expected).ids) + 1 for i in items_of(made))
    assert sum(len(b.rows) for b in parts) >= wanted
    assert all(sum(rows * length for rows, length in b.groups) == len(b.ids) for b in parts)


def _copied(model: Decoder) -> float:
    """Share of the tokens of random sequences' second sayings that the model has as its first choice."""
    examples = repeats(Draw("second sayings", Split.EVAL), range(4000), 800)
    ids, targets = (torch.tensor([getattr(e, k) for e in examples]) for k in ("ids", "targets"))
    with torch.no_grad():
        best = model.logits(model(ids.flatten(), [tuple(ids.shape)])).argmax(-1).view_as(targets)
    learned = targets != IGNORE
    return float((best == targets)[learned].float().mean())


def test_a_second_saying_repeats_the_first() -> None:
    for example in repeats(Draw("any", Split.TRAIN), range(50), 300):
        said = [t for t in example.targets if t != IGNORE]
        assert example.ids[1 : len(said) + 1] == said
        assert example.targets[-len(said) :] == said


def test_a_model_copies_from_birth() -> None:
    made = Decoder(MINI)
    wiring.initialize(made, torch.Generator().manual_seed(1))
    assert _copied(made.eval()) > 0.6
    with torch.no_grad():  # without the head that notes the previous token, nothing is left
        made.layers[0].self_attn.o_proj.weight[:, : MINI.head_dim] = 0.0
    assert _copied(made) < 0.05


def _options(out: Path, tokenizer_folder: Path) -> Options:
    return Options(
        shape="toy",
        tokenizer=tokenizer_folder,
        out=out,
        steps=4,
        warmup=1,
        pool=12,
        steps_per_pool=3,
        held_out=4,
    )


def test_a_model_that_has_grown_says_what_it_said() -> None:
    """Every weight of the new blocks and neurons but their outputs is there, so that training can use them."""
    small = Decoder(TOY)
    wiring.initialize(small, torch.Generator().manual_seed(1))
    larger = replace(TOY, layers=5, intermediate=192)
    large = grown(small, larger, torch.Generator().manual_seed(2))
    ids = torch.randint(0, TOY.vocab, (40,), generator=torch.Generator().manual_seed(3))
    rows = torch.arange(40)
    with torch.no_grad():
        said = [m.logits(m.eval()(ids, [(1, 40)], rows)) for m in (small, large)]
    assert (said[0] - said[1]).abs().max() < 1e-5
    zero = {name for name, weight in large.state_dict().items() if not weight.any()}
    assert {name.split(".")[1] for name in zero} == {"1", "2", "4"}
    assert {name.split(".")[3] for name in zero} == {"o_proj", "down_proj"}
    with pytest.raises(ValueError, match="only layers and intermediate may differ"):
        grown(small, replace(larger, vocab=2048), torch.Generator())
    with pytest.raises(ValueError, match="smaller than the trained model"):
        grown(large, TOY, torch.Generator())


def test_a_run_that_stopped_goes_on_as_if_it_had_not(tmp_path: Path, tokenizer_folder: Path) -> None:
    Trainer(_options(tmp_path / "whole", tokenizer_folder)).run()
    part = _options(tmp_path / "part", tokenizer_folder)
    Trainer(replace(part, stop_after=2)).run()
    Trainer(part).run()
    whole, parts = (hf_folder.load(tmp_path / n / "model").state_dict() for n in ("whole", "part"))
    assert all(torch.equal(whole[k], parts[k]) for k in whole)
    losses = []
    for name in ("whole", "part"):
        with (tmp_path / name / "loss.csv").open() as file:
            losses.append([(r["step"], r["loss"]) for r in csv.DictReader(file)])
    assert losses[0] == losses[1]
    assert (tmp_path / "part" / "loss.svg").read_text().startswith("<svg")


def test_a_run_ends_when_told_to_and_may_be_made_longer(tmp_path: Path, tokenizer_folder: Path) -> None:
    options = replace(_options(tmp_path, tokenizer_folder), steps=0, hours=100.0)
    Trainer(replace(options, stop_after=3)).run()
    ended = Trainer(replace(options, finish=True))
    ended.run()
    assert (ended.schedule.start, ended.step) == (3, 4)
    longer = Trainer(options)
    assert (longer.schedule.start, longer.step) == (None, 3)
    with (tmp_path / "loss.csv").open() as file:
        assert [r["step"] for r in csv.DictReader(file)] == ["0", "1", "2"]
    with pytest.raises(ValueError, match="steps or hours"):
        Trainer(replace(options, steps=5))
    with pytest.raises(ValueError, match="no checkpoint"):
        Trainer(replace(options, out=tmp_path / "none", finish=True))


def test_the_newest_checkpoints_are_kept_and_have_a_mean(tmp_path: Path, tokenizer_folder: Path) -> None:
    options = replace(_options(tmp_path / "run", tokenizer_folder), keep=2)
    for _ in range(3):
        Trainer(replace(options, stop_after=1)).run()
    kept = sorted((tmp_path / "run/kept").iterdir())
    assert [file.stem for file in kept] == ["0000002", "0000003"]
    first, last = (average.mean([file]) for file in kept)
    both = average.mean(kept)
    assert all(torch.equal(both[name], (first[name] + last[name]) / 2) for name in both)
    assert not all(torch.equal(both[name], last[name]) for name in both)


def test_the_build_goes_on_from_a_model_with_its_tokenizer(tmp_path: Path) -> None:
    def tokenizers_of(budget: build.Budget) -> set[str]:
        commands = [p.command for p in build.parts(tmp_path, budget, seed=2, threads=1, machine="m")]
        return {c[c.index("--tokenizer") + 1] for c in commands if "--tokenizer" in c}

    start = tmp_path / "start"
    going_on = build.full(1.0, finish=False, start=start, start_draft=None)
    assert tokenizers_of(going_on) == {str(build._SHIPPED)}
    start.mkdir()
    (start / "tokenizer.json").touch()
    assert tokenizers_of(going_on) == {str(start)}
    assert going_on.mini[going_on.mini.index("--start") + 1] == str(start)
    assert tokenizers_of(build.TRIAL) == {str(tmp_path / "tokenizer")}


def test_workers_make_the_same_steps(tokenizer_folder: Path) -> None:
    tokenizer = tokenizers.load(tokenizer_folder)
    plan = BatchPlan(seed=1, pool=8, steps_per_pool=1, prompts=0.5)
    source = partial(conversation, 1, Split.TRAIN)
    alone, helped = Batches(source, tokenizer, plan), Batches(source, tokenizer, plan, workers=1)
    for step in range(2):
        for ours, theirs in zip(alone.step(step), helped.step(step), strict=True):
            assert torch.equal(ours.ids, theirs.ids)
            assert torch.equal(ours.rows, theirs.rows)


def test_prompts_are_learned_where_asked(tokenizer_folder: Path) -> None:
    tokenizer = tokenizers.load(tokenizer_folder)
    made = Conversation("any", [system("Be brief."), user("Say pear."), assistant("Pear.")])
    learned = [
        tokenizer.decode([t for t in encode(made, tokenizer, prompts=p).targets if t != IGNORE])
        for p in (False, True)
    ]
    assert learned == ["Pear.", "user\nSay pear.\nPear."]


def test_muon_steps_as_torchs() -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(size, generator=generator) for size in ((8, 20), (20, 8), (8, 20))]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    mine = Muon(ours, weight_decay=0.1)
    mine.param_groups[0]["lr"] = 0.01
    reference = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=0.0)  # torch's works in bfloat16


def test_the_tokenizer_has_a_name_in_gguf(tokenizer_folder: Path) -> None:
    data = (tokenizer_folder / "tokenizer.json").read_bytes()
    config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    found, notices = tokenizer_metadata(data, {"eos_token": config["eos_token"]}, TOY.vocab, "")
    assert (found["tokenizer.ggml.pre"], notices) == ("qwen2", [])


def test_names_are_cut_alike_everywhere(tokenizer_folder: Path) -> None:
    tokenizer = tokenizers.load(tokenizer_folder)
    for name in ("Marta", "Ibrahim", "Oslo"):
        said, alone = tokenizer.encode(f"is {name}").ids, tokenizer.encode(name).ids
        assert said[-len(alone) :] == alone
        assert tokenizer.encode(f'"{name}').ids == [*tokenizer.encode('"').ids, *alone]
        assert tokenizer.encode(f"({name}").ids[1:] == alone
    assert tokenizer.encode("27").tokens == ["2", "7"]


def test_a_run_with_other_options_is_not_continued(tmp_path: Path, tokenizer_folder: Path) -> None:
    options = replace(_options(tmp_path, tokenizer_folder), steps=1)
    Trainer(options).run()
    with pytest.raises(ValueError, match="other options"):
        Trainer(replace(options, seed=2))


def test_distillation_needs_no_other_data(tmp_path: Path, tokenizer_folder: Path, folder: Path) -> None:
    options = replace(_options(tmp_path, tokenizer_folder), steps=1, teacher=folder)
    Trainer(options).run()
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "qwen3"


def test_schedule_rises_stays_and_falls() -> None:
    schedule = Schedule(peak=1.0, warmup=10)
    assert [schedule.rate(i) for i in (0, 4, 9, 1000)] == [0.1, 0.5, 1.0, 1.0]
    assert schedule.end is None
    ending = replace(schedule, start=60, cooldown=40)
    rates = [ending.rate(i) for i in range(100)]
    assert rates[:60] == [schedule.rate(i) for i in range(60)]
    assert rates[59:] == sorted(rates[59:], reverse=True)
    assert (ending.end, rates[-1] > 0, rates[-1] < 0.02) == (100, True, True)


def test_merged_adapter_equals_the_attached_one(tmp_path: Path, folder: Path) -> None:
    model = hf_folder.load(folder)
    lora.attach(model, torch.Generator().manual_seed(1))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator().manual_seed(2))
        assert weight.requires_grad == ("lora_" in name)
    lora.save(model, tmp_path, "quire-mini", torch.float32)
    merged = hf_folder.load(folder)
    lora.merge(merged, tmp_path)
    ids = torch.arange(30) + 3
    with torch.no_grad():
        torch.testing.assert_close(merged(ids, [(1, 30)]), model(ids, [(1, 30)]), atol=1e-4, rtol=1e-4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", lora.RANK)


def _random(shape: Shape) -> Decoder:
    model = Decoder(shape)
    wiring.initialize(model, torch.Generator().manual_seed(3))
    return model.eval()
