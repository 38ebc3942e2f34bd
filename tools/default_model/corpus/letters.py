"""Short emails, invitations, thank-you notes and cards."""

from __future__ import annotations

from .conversation import Turn
from .draw import Draw
from .tasks import answered, pairs, request, sections
from .wording import expand, word
from .words import OBJECTS, WEEKDAYS, city, first_name, plural


def turns(draw: Draw) -> list[Turn]:
    """A letter from facts: who, to whom, what about."""
    texts = sections("letters")
    gift = draw.pick(OBJECTS)
    slots = {
        "m": first_name(draw), "n": first_name(draw), "day": draw.pick(WEEKDAYS), "city": city(draw), "gift": gift,
        "gifts": plural(gift), "k": str(draw.between(2, 30)),
    }  # fmt: skip
    if draw.chance(0.25):
        ask, said = draw.pick(pairs("letters", "cards"))
        return answered(request(draw, "card", (ask,), slots), word(draw, said, **slots), "card")
    what, body = draw.pick(pairs("letters", "letters"))
    form = expand(draw, draw.pick(texts["forms"])).replace("{what}", expand(draw, what)).strip()
    signed = "{n}" in form
    asked = request(draw, "letter", (form,), slots)
    lines = [f"Dear {slots['m']},", "", word(draw, body[0].upper() + body[1:], **slots), "", texts["ends"][0]]
    return answered(asked, "\n".join([*lines, slots["n"]] if signed else lines).rstrip(","), "email")
