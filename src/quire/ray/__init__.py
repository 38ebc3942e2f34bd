"""Quire on a Ray cluster: `Predictor` and `predict` for Ray Data, `serve_app` for Ray Serve. See docs/ray.md.

Ray is no dependency of Quire: `pip install 'quire-llm[ray]'` brings it.
"""

from quire.ray.batches_of_rows import Predictor, predict
from quire.ray.serve_replica import build, serve_app

__all__ = ["Predictor", "build", "predict", "serve_app"]
