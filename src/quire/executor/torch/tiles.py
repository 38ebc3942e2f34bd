"""How much the ops of torch compute at once, which bounds what they allocate."""

QUERY_TILE = 256  # queries scored at once, so that scores stay small beside the cache
WEIGHT_TILE = 1 << 22  # weight elements widened to float32 at once: 16 MiB
RECENT_STRETCH = 64  # positions; see Attend.recent
