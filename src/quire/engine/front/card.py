"""The card of a served model, and the part of its configuration that can be changed."""

from __future__ import annotations

import time
from collections.abc import Mapping

from quire.config.live import LiveConfig
from quire.config.schema import EngineConfig, SchedulerOptions
from quire.config.serving import ServingConfig
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.api import ModelCard
from quire.engine.build.opening import Model
from quire.engine.front.text_service import TextService
from quire.engine.host.messages import Ready
from quire.objectives import parse_classes


def model_card(name: str, model: Model, ready: Ready, text: TextService, config: EngineConfig) -> ModelCard:
    """What /v1/models says, from the checkpoint and what its engine was built with."""
    facts, tiers = model.facts, config.cache.tiers
    return ModelCard(
        name=name,
        architecture=facts.architecture,
        max_model_len=ready.scheduler.max_model_len,
        vocab_size=ready.vocab,
        config_sha256=facts.config_sha256,
        template_hash=text.template_hash,
        created=int(time.time()),
        default_sampling=dict(facts.generation.sampling),
        eos_token_ids=ready.eos_token_ids,
        notices=ready.notices,
        answers=text.answers,
        acceptance=config.speculation.acceptance(),
        cache_block=ready.scheduler.block_size * ready.scheduler.enable_prefix_caching,
        template_variables=text.template_variables,
        pooling=facts.pooling,
        chat_template=text.template_source,
        special_tokens={} if text.tokenizer is None else text.tokenizer.special_tokens,
        max_num_seqs=ready.scheduler.max_num_seqs,
        embed_dim=ready.embed_dim,
        service_classes=parse_classes(config.scheduler.slo),
        peers=("", "", "") if tiers is None else (tiers.role, tiers.key_file, ready.blocks),
        weights=ready.weights,
        bits=ready.bits,
    )


def first_live_config(
    facts: SchedulerConfig, options: SchedulerOptions, serving: ServingConfig, shares: Mapping[str, float]
) -> LiveConfig:
    """What an engine was started with."""
    return LiveConfig(
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_draft_tokens=facts.max_draft_tokens,
        max_num_queued_reqs=serving.max_num_queued_reqs,
        max_num_queued_tokens=serving.max_num_queued_tokens,
        scheduling_policy=options.scheduling_policy,
        overtake_ms=facts.overtake * 1e3,
        slo=tuple(options.slo),
        admission=options.admission,
        log_level=serving.log_level,
        cache_shares=dict(shares),
    )
