"""The paper, for TRL's card of a run."""

QURL = {
    "title": "QuRL: Efficient Reinforcement Learning with Quantized Rollout",
    "id": "2602.13953",
    "citation": """@inproceedings{qurl2026,
    title        = {{QuRL: Efficient Reinforcement Learning with Quantized Rollout}},
    author       = {Li, Yuhang and Elangovan, Reena and Dong, Xin and Panda, Priyadarshini
                    and Khailany, Brucek},
    year         = 2026,
    booktitle    = {ICLR},
    eprint       = {2602.13953},
    archivePrefix = {arXiv},
}""",
}
"""The paper, in the format of TRL's cards (`_paper`)."""
