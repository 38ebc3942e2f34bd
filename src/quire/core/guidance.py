"""What a request with classifier-free guidance may ask for, and the request of its negative prompt."""

from __future__ import annotations

from dataclasses import replace

from quire.types import Request, RequestError, SamplingParams


def check_guidance(request: Request) -> None:
    """Raise RequestError, naming the field, for a request that has only a part of guidance, or what guidance cannot
    have."""
    guided, params = request.params.guidance_scale != 1, request.params
    if not guided and request.negative_prompt is None:
        return
    if not guided:
        raise RequestError("negative_prompt", "has no effect without a guidance_scale other than 1")
    if request.negative_prompt is None:
        raise RequestError("guidance_scale", "needs a negative prompt, which has at least one token")
    if params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs", "not supported with guidance_scale: a prompt is not guided")
    for field, given in (("prediction", request.prediction), ("use_beam_search", request.beams)):
        if given:
            raise RequestError(field, "not supported with guidance_scale")


def negative_of(request: Request, limit: int, seed: int) -> Request:
    """The request of the followers. `limit` is that of the leaders."""
    assert request.negative_prompt is not None
    length = limit - len(request.prompt_token_ids)
    return replace(
        request,
        request_id=f"{request.request_id}\0negative",
        prompt_token_ids=request.negative_prompt,
        params=SamplingParams(temperature=0, max_tokens=length, n=request.params.n, seed=seed),
        eos_token_ids=(),
        soft_tokens=(),
        grammar=None,
        regions=None,
        texts=None,
        negative_prompt=None,
    )
