"""Files of questions."""

import json


def write_questions(path, answers):
    """Write a question for each answer, and return the path as text."""
    with path.open("w") as file:
        for number, answer in enumerate(answers):
            row = {"question": f"What is {number} + 1?", "answer": answer}
            file.write(json.dumps(row) + "\n")
    return str(path)
