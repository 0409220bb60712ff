"""Models are made one at a time.

While they make a model, transformers and accelerate patch torch for all threads of the process: of
two at once, one would get parameters without values, and the patches of the first to begin would
stay for good.
"""

from __future__ import annotations

import threading

MODEL_LOCK = threading.RLock()
"""Held while a model is made."""
