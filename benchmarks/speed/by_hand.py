"""Serve as people do by hand: FastAPI, one request after the other, under a lock.

    python benchmarks/speed/by_hand.py lora PORT      64 adapters of peft, `set_adapter`
    python benchmarks/speed/by_hand.py vectors PORT   sentence-transformers, without adapters

It needs fastapi. Bodies and answers are those of `adapterhub serve`'s /v1/predict, with one input.
The adapters of peft have heads with the same two labels: others cannot be on one model.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from typing import Any

import torch
import uvicorn
from fastapi import Body, FastAPI

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
Answer = Callable[[str, str], Any]


def lora() -> Answer:
    """Return what classifies a text with one of 64 adapters."""
    import peft
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from adapterhub.backbones.find import find_backbone

    folder = find_backbone(MODEL)[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=8)
    backbone = AutoModelForSequenceClassification.from_pretrained(folder)
    model = peft.get_peft_model(backbone, config, adapter_name="0")
    for number in range(1, 64):
        model.add_adapter(str(number), config)
    model.eval()

    def answer(name: str, text: str) -> Any:
        model.set_adapter(name)
        inputs = tokenizer(text, return_tensors="pt", truncation=True)
        probabilities = model(**inputs).logits[0].softmax(-1).tolist()
        return {"label": probabilities.index(max(probabilities)), "probabilities": probabilities}

    return answer


def vectors() -> Answer:
    """Return what gives the vector of a text."""
    from sentence_transformers import SentenceTransformer

    from adapterhub.backbones.find import find_backbone

    model = SentenceTransformer(str(find_backbone(MODEL)[0]))
    return lambda _, text: {"vector": model.encode(text, show_progress_bar=False).tolist()}


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("lora", "vectors"))
    parser.add_argument("port", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    answer = {"lora": lora, "vectors": vectors}[options.what]()
    app, lock = FastAPI(), threading.Lock()

    @app.get("/readyz")
    def ready() -> dict[str, str]:
        return {}

    @app.post("/v1/predict")
    def predict(model: str = Body(), inputs: list[str] = Body()) -> dict[str, Any]:  # noqa: B008
        with lock, torch.inference_mode():
            return {"outputs": [answer(model, text) for text in inputs]}

    uvicorn.run(app, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
