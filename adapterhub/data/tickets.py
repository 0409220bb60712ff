"""Tickets to a shop, with the fields that its support needs: made-up chats with an answer.

A ticket is one or two sentences in everyday words; the answer is one line of JSON with the team,
the product (null if none is named) and the urgency. Held-out tickets are about other products, in
other sentences, than the training rows: the test measures whether the form and the fields were
learned, not the sentences.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

Chat = dict[str, list[dict[str, str]]]

TRAIN, HELD_OUT = 240, 60  # rows
INSTRUCTION = (
    "Answer with one line of JSON: team (billing, delivery, repair or account), product (or null) "
    "and urgency (high, normal or low)."
)
"""The instruction for a model that was not trained on these chats."""


class _Words(NamedTuple):
    """The parts of tickets: products, sentences by team, and remarks by urgency."""

    products: tuple[str, ...]
    teams: Mapping[str, tuple[str, ...]]
    remarks: Mapping[str, tuple[str, ...]]


_TO_LEARN = _Words(
    ("router", "coffee machine", "bike lamp", "keyboard", "tent", "lawn mower", "desk", "blender",
     "backpack", "printer", "toaster", "office chair", "camera", "sleeping bag", "drill"),
    {
        "billing": ("I was charged twice for the {}.", "The invoice of my {} has the wrong amount.",
                    "You have not refunded the {} that I sent back.", "The {} was cheaper in the "
                    "shop than on my bill.", "Please send me the receipt of the {}.",
                    "My voucher was not counted for the {}.", "The bill has a wrong tax number."),
        "delivery": ("The {} has not arrived.", "The courier left my {} in the rain.",
                     "Where is the parcel with the {}?", "Please send the {} to my new address.",
                     "The tracking of the {} has not moved for a week.",
                     "The {} was delivered to a neighbour.", "Nobody rang the bell today."),
        "repair": ("The {} does not start.", "My {} makes a strange noise.",
                   "The {} broke after a week.", "A part of the {} is loose.",
                   "The {} smells burnt.", "The {} gets hot and stops.",
                   "The screws do not fit."),
        "account": ("I cannot log in.", "My password is not accepted.",
                    "Please delete my account.", "The code by SMS never came.",
                    "How do I change my e-mail address?", "My account is locked.",
                    "The app signs me out all the time."),
    },
    {
        "high": ("I need it by tomorrow!", "This is urgent.", "Please hurry.",
                 "It has to be solved today."),
        "low": ("No rush.", "Whenever you have time.", "It can wait.", "There is no hurry."),
        "normal": ("", "", "Thank you.", "Kind regards", "Best wishes"),
    },
)  # fmt: skip
_TO_ASK = _Words(
    ("kettle", "headset", "tablet", "rucksack", "vacuum cleaner", "lamp", "saw", "scooter"),
    {
        "billing": ("You took the money for the {} two times.",
                    "I still wait for my money back for the {}.",
                    "The price of the {} on the invoice is not right."),
        "delivery": ("I am still waiting for my {} to come.",
                     "The box with the {} is lost, says the courier.",
                     "Can the {} be brought to another address?"),
        "repair": ("The {} is broken.", "My {} stopped working.", "The {} does not turn on."),
        "account": ("I forgot my password.", "The login page does not let me in.",
                    "Please close my account."),
    },
    {
        "high": ("It is urgent!", "I need an answer today."),
        "low": ("There is no rush.", "It is not in a hurry."),
        "normal": ("", "Many thanks"),
    },
)  # fmt: skip


def load_tickets(seed: int = 0) -> tuple[list[Chat], list[Chat]]:
    """Return chats to train on and others to evaluate on, as rows of `messages`."""
    train, held_out = _chats(_TO_LEARN, seed), _chats(_TO_ASK, seed)
    return list(itertools.islice(train, TRAIN)), list(itertools.islice(held_out, HELD_OUT))


def instructed(chat: Chat) -> Chat:
    """Return a chat that begins with the instruction."""
    return {"messages": [{"role": "system", "content": INSTRUCTION}, *chat["messages"]]}


def _chats(words: _Words, seed: int) -> Iterator[Chat]:
    """Yield distinct tickets, with all teams and urgencies equally frequent."""
    rng, seen = random.Random(seed), set()
    for team, urgency in itertools.cycle(itertools.product(words.teams, words.remarks)):
        sentence, product = rng.choice(words.teams[team]), rng.choice(words.products)
        ticket = f"{sentence.format(product)} {rng.choice(words.remarks[urgency])}".strip()
        if ticket not in seen:
            seen.add(ticket)
            named = product if "{}" in sentence else None
            answer = json.dumps({"team": team, "product": named, "urgency": urgency})
            turns = {"user": ticket, "assistant": answer}
            yield {"messages": [{"role": role, "content": text} for role, text in turns.items()]}
