"""Batches of requests in OpenAI's format: lines of JSON in, lines of JSON out."""
