"""WebSocket: the text part of OpenAI's Realtime API. Needs the package `websockets`, the extra `websocket`."""
