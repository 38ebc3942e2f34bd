"""Request fields of other servers that Quire does not implement: harmless values pass, the rest is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.server.errors import ApiError, shorten
from quire.server.refusals import REASONS
from quire.types import PARAMETERS, parameter_names

# Labels, and fields that ask for what happens with any value of them (docs/clients.md says why).
IGNORED = frozenset((
    "user", "metadata", "safety_identifier", "session_id", "parallel_tool_calls", "prompt_cache_key",
    "cache_control", "include_reasoning", "truncation_side",
))  # fmt: skip

# Fields that would change the result: name -> accepted values, which ask for the default behaviour (null always does).
RefusedFields = Mapping[str, tuple[Any, ...]]
_COMMON: dict[str, tuple[Any, ...]] = {
    "cache_prompt": (True,),
    "id_slot": (-1,),
    "logprobs_mode": ("raw_logprobs",),
    "moderation": (),
    "n_cache_reuse": (0,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "timings_per_token": (False,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "guided_decoding_backend": ("auto", "guidance", "llguidance"),
    "prompt_cache_options": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_request": (),
    "mm_processor_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "vllm_xargs": ({},),
}
# Further fields of vLLM and SGLang.
_COMMON |= {
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_labels": ({},),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "data_parallel_rank": (),
    "disagg_prefill_dp_rank": (),
    "ebnf": (),
    "ec_transfer_params": ({},),
    "extra_key": (),
    "images_config": ({},),
    "input_ids": (),
    "lora_path": (),
    "max_dynamic_patch": (),
    "media_io_kwargs": ({},),
    "min_dynamic_patch": (),
    "ngram_corpus_id": (),
    "no_stop_trim": (False,),
    "regex": (),
    "repetition_detection": (),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_mm_kwargs": (True, False),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_token_offsets": (False,),
    "rid": (),
    "routed_dp_rank": (),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "stop_regex": ([],),
    "stream_interval": (1,),
    "stream_reasoning": (True,),
    "task": (),
    "use_audio_in_video": (False,),
    "watermarking": (False,),
}
# Fields of Ollama, llama-server and TGI on the same routes.
_COMMON |= {
    "adapter_id": (),
    "do_sample": (True,),
    "n_keep": (0,),
    "n_probs": (0,),
    "options": ({},),
    "raw": (False,),
    "system": ("",),
    "t_max_predict_ms": (0,),
    "template": ("",),
    "think": (),
    "watermark": (False,),
}
_CHAT: RefusedFields = {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "echo": (False,),
    "modalities": (["text"], []),
    "prompt_embeds": (),
    "verbosity": ("medium",),
    "reasoning": (),
    "web_search_options": (),
}
_COMPLETION: RefusedFields = {"top_logprobs": (0,)}
_WHY = dict(REASONS)
# Parameters that have another name in Quire.
for _name, _here in (parameter_names("llama-server") | parameter_names("TGI")).items():
    if _name == _here:
        continue
    _default = PARAMETERS[_here].default
    _forms = () if _default is None else (float(_default), int(_default))
    _COMMON[_name] = tuple(same for same in _forms if same == _default)
    _WHY[_name] = f"not supported; use {_here}"

CHAT: RefusedFields = {**_COMMON, **_CHAT}
COMPLETION: RefusedFields = {**_COMMON, **_COMPLETION}
CONVERSATION: RefusedFields = {"chat_template": ()}  # rendered, not answered


class Unsupported:
    """The fields that one route refuses, and how to read their values from a body."""

    def __init__(
        self, request: type[msgspec.Struct], refused: RefusedFields, ignored: frozenset[str] = IGNORED
    ) -> None:
        self._ignored = ignored
        self._known = frozenset(request.__struct_encode_fields__)
        self._refused = refused
        self._why = {name: _WHY[name] for name in refused}  # each has a reason
        self._values = msgspec.json.Decoder(
            msgspec.defstruct("Values", [(name, Any, None) for name in refused])
        )

    def check(self, names: set[str], body: bytes, *, refuse_unknown: bool) -> None:
        """Raise ApiError 400 naming the first field that would change the result or is unknown."""
        extra = names - self._known
        if extra & self._refused.keys():
            values = self._values.decode(body)
            for name in sorted(extra & self._refused.keys()):
                self._check_value(name, getattr(values, name))
        unknown = sorted(extra - self._ignored - self._refused.keys())
        if refuse_unknown and unknown:
            name = shorten(unknown[0], 100)
            raise ApiError(400, f"{name}: unknown field", code="unknown_field", param=name)

    def _check_value(self, name: str, value: Any) -> None:
        if value is None or any(type(value) is type(same) and value == same for same in self._refused[name]):
            return
        raise ApiError(400, f"{name}: {self._why[name]}", code="unsupported_parameter", param=name)
