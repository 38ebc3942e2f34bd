"""Low-rank adapters: read from their files, checked against a base model, merged into its weights."""

BLOCK_BYTES = 2**20  # of a matrix of the base or of an adapter that are read at a time
