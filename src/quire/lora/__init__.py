"""Low-rank adapters: read from their files, checked against a base model, merged into its weights."""
