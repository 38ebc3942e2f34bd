"""How requests are spread over replicas, and what moving a KV cache costs: pure functions."""
