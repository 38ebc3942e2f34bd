"""Making smaller models: `quire prune`.

`masks` sets single weights to zero, in the run of quire.offline.quantize. `choosing` and `cutting` take whole heads,
channels of feed-forwards or layers out, `structured` is their run.
"""
