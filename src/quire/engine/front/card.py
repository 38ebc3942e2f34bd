"""The card of a served model."""

from __future__ import annotations

import time

from quire.config.schema import EngineConfig
from quire.engine.api import ModelCard
from quire.engine.build.opening import Model
from quire.engine.front.text_service import TextService
from quire.engine.host.messages import Ready
from quire.objectives import parse_classes


def model_card(name: str, model: Model, ready: Ready, text: TextService, config: EngineConfig) -> ModelCard:
    """What /v1/models says, from the checkpoint and what its engine was built with."""
    facts = model.facts
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
    )
