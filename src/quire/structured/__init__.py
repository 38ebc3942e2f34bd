"""Grammars: what the output of a request must look like, compiled in the API process and stepped in the engine's."""
