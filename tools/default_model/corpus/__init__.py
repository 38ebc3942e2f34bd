"""Seeded generator of chat conversations, one module a domain."""
