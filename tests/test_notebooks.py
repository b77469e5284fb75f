"""The notebooks as a reader runs them, from the first cell to the last, on a tiny model and with tiny sizes.

Nothing but the cell of sizes is replaced. What the notebooks start is real: `trl-qurl eval`, the trainers, vLLM.
"""

import json
import re
from pathlib import Path

import nbformat
import pytest
import torch
from conftest import child_environment
from tiny import SHARED, VOCABULARY, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STORIES = SHARED / "models" / "stories260K"

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

# A first line of a message, of a few characters; the instruction below it would make up most of a tiny model's work.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'].split('\\n')[0] }}{% endfor %}"


def warm_model() -> torch.nn.Module:
    """Answers `a+b=` with one of the digits 2, 3, 4 and the end of its text: every third answer earns the reward."""
    model = tiny_model(max_position_embeddings=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor(tiny_tokenizer()([f"{a}+{b}={c}<eos>" for a in "12" for b in "12" for c in "234"])["input_ids"])
    for _ in range(40):
        loss = model(input_ids=ids, labels=ids.masked_fill(torch.arange(6) < 4, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model
