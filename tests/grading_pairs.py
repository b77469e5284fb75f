r"""What the default reward says: an answer of the data, what the completion's `\boxed{}` holds, the
verdict, and why.

`tests/test_grading.py` grades every row as training does. The table in docs/from-trl.md shows some
of these rows.
"""

PAIRS = [
    # Numbers
    ("12 500", "12,500", "right", "spaces, also thin ones, and commas separate thousands"),
    ("12500", "12\\,500", "right", "a thin space of TeX"),
    ("3,14", "3.14", "wrong", "3,14 is a list of two numbers; the decimal sign is a point"),
    ("12.500", "12500", "wrong", "the decimal sign is a point"),
    ("1, 2", "2, 1", "right", "the order of a list does not count"),
    ("1, 2", "1", "wrong", "half of a list"),
    (".5", "0.5", "right", "a zero that is left out"),
    (".5", "5", "wrong", "in a number, punctuation counts"),
    ("5", ".5", "wrong", "in a number, punctuation counts"),
    ("'5", "5", "right", "a spreadsheet's mark for a text"),
    ("5!", "5", "wrong", "5! is 120"),
    ("25", "5²", "right", "an exponent of Unicode"),
    ("52", "5²", "wrong", "an exponent is no digit"),
    ("-5", "−5", "right", "Unicode's minus sign"),
    ("-5", "5", "wrong", "the sign counts"),
    ("1 1/2", "1.5", "right", "a mixed number"),
    ("1½", "\\frac{3}{2}", "right", "a mixed number of Unicode"),
    ("1/3", "0.333333", "right", "equal to six decimals"),
    ("1/3", "0.33", "wrong", "rounded too far"),
    ("1.5 million", "1,500,000", "right", "thousand to trillion multiply"),
    ("1e6", "1000000", "right", "scientific notation"),
    ("12", "twelve", "wrong", "numbers in words are not read"),
    # Units
    ("12", "12 legs", "right", "units are ignored, because the same unit has many spellings"),
    ("12 legs", "12", "right", "units are ignored"),
    ("12 legs", "12 dollars", "right", "units are ignored, even another one"),
    ("5 m", "500 cm", "wrong", "units are not converted"),
    ("5 km", "5km", "right", "common units need no space"),
    ("18", "\\$18.00", "right", "a currency is a unit"),
    ("90", "90^\\circ", "right", "degrees are a unit"),
    ("12.5", "12.5\\%", "right", "percent may be a unit"),
    ("0.125", "12.5\\%", "right", "percent may be a hundredth"),
    ("3", "3t", "wrong", "a variable is no unit"),
    ("3t", "3", "wrong", "a variable is no unit"),
    # Texts
    ("Paris", "\\text{paris}.", "right", "case, style and punctuation around a text do not count"),
    ("Paris", "Siarp", "wrong", "a word is no product of letters"),
    ("état", "etat", "wrong", "accents count"),
    ("Yes", "No", "wrong", "another word"),
    ("A", "(a)", "right", "a choice, with or without brackets"),
    ("(A)", "A.", "right", "a choice, with or without a full stop"),
    ("A", "(A) Paris", "wrong", "more than the letter"),
    ("B12", "B21", "wrong", "a code is a text"),
    ("e4", "4e", "wrong", "a code is a text"),
    ("H2O", "\\mathrm{H_2O}", "right", "a subscript is style"),
    ("9 am", "9\\text{ a.m.}", "right", "the same time"),
    ("9 am", "9 pm", "wrong", "am and pm are no units"),
    ("10:30", "1/3", "wrong", "a time is no ratio"),
    ("2024-01-05", "2018", "wrong", "a date is no subtraction"),
    ("30 October", "30 November", "wrong", "months are no units"),
    ("555-4567", "-4012", "wrong", "a telephone number is no subtraction"),
    # Formulas
    ("2xy", "2yx", "right", "an equal formula"),
    ("x = 5", "5", "right", "the name of a value does not count"),
    ("(1, 2)", "(2, 1)", "wrong", "the order of coordinates counts"),
    ("f'", "f", "wrong", "a derivative"),
    ("C++", "C", "wrong", "what is no formula must be the same"),
    # No answer
    ("?", "", "wrong", "an empty box"),
]
