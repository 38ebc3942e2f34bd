"""Making smaller models: `quire prune`.

`masks` sets single weights to zero, in the run of quire.offline.quantize. `structures` chooses whole heads,
channels of feed-forwards or layers, `prune_run` takes them out.
"""
