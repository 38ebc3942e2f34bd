"""The HTTP server: OpenAI's API as a plain ASGI application over quire.engine.api.Engine."""
