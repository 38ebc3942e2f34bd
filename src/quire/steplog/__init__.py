"""The log of an engine: its rows and files, the recorder that writes them, and what can be read from them."""
