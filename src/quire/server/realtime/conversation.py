"""The conversation of a session: items in order, whose memory is counted."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from quire.server.dialects.asking import renamed
from quire.server.dialects.responses_input import chat_messages
from quire.server.errors import bad_request
from quire.server.request_memory import Held, RequestMemory
from quire.server.requests import MAX_MESSAGES

Item = dict[str, Any]

ROOT = "root"  # as the item before: the start
_MAX_ID_CHARS = 64


class RealtimeConversation:
    """Items by their ids, in order. What they hold is taken from the memory of bodies, for `held`."""

    def __init__(self, memory: RequestMemory, held: Held) -> None:
        self._memory, self._held = memory, held
        self.items: list[Item] = []

    def add(self, given: Item, after: str | None) -> tuple[Item, str | None]:
        """Add an item of the client behind the item `after`, by default at the end; returns it as it is kept, and the
        id of the one before it. Raises ApiError naming the field.
        """
        name = given.get("id")
        if name is not None and not (isinstance(name, str) and 0 < len(name) <= _MAX_ID_CHARS):
            raise bad_request("item.id", f"item.id: must be a text of 1 to {_MAX_ID_CHARS} characters")
        if name == ROOT or any(item["id"] == name for item in self.items):
            raise bad_request("item.id", f"item.id: {name!r} is in use")
        with renamed({r"input\[0\]": "item"}):
            chat_messages([given], None)
        place = self._place(after)
        item = given | {
            "id": name or f"item_{uuid.uuid4().hex[:24]}", "object": "realtime.item", "status": "completed",
            "type": given.get("type", "message"),
        }  # fmt: skip
        self._insert(place, item)
        return item, self.items[place - 1]["id"] if place else None

    def append(self, item: Item) -> str | None:
        """Add an item of an answer, which is filled later; returns the id of the one before it."""
        before = self.items[-1]["id"] if self.items else None
        self._insert(len(self.items), item)
        return before

    def fill(self, item: Item, found: Item) -> None:
        """Give an item of an answer its content. Raises ApiError 429 if there is no memory for it."""
        self._memory.take_body(self._held, _size(found))
        item |= found

    def find(self, name: str | None) -> Item:
        """The item of this id. Raises ApiError."""
        for item in self.items:
            if item["id"] == name:
                return item
        raise bad_request("item_id", f"item_id: no item has the id {name!r:.80}", "item_not_found")

    def delete(self, name: str | None) -> None:
        """Remove an item. Raises ApiError if there is none of this id."""
        item = self.find(name)
        self.items.remove(item)
        self._memory.give_body(self._held, _size(item))

    def resolved(self, given: list[Item]) -> list[Item]:
        """Items of a response, where one may refer to an item of the conversation."""
        return [self.find(item.get("id")) if item.get("type") == "item_reference" else item for item in given]

    def _place(self, after: str | None) -> int:
        if after is None:
            return len(self.items)
        if after == ROOT:
            return 0
        for place, item in enumerate(self.items, 1):
            if item["id"] == after:
                return place
        raise bad_request("previous_item_id", "previous_item_id: no item has this id", "item_not_found")

    def _insert(self, place: int, item: Item) -> None:
        if len(self.items) >= MAX_MESSAGES:
            raise bad_request("item", f"item: the conversation has {MAX_MESSAGES} items, its limit")
        self._memory.take_body(self._held, _size(item))
        self.items.insert(place, item)


def _size(item: Item) -> int:
    return len(msgspec.json.encode(item))
