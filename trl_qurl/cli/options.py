"""Options and checks shared by several subcommands."""

import argparse
from pathlib import Path
from typing import Any

from trl_qurl.paths import check_model_directory, is_local


class PatternAction(argparse.Action):
    """Action that collects the values of a repeated option; the first replaces the default."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        """Add one value."""
        collected = getattr(namespace, self.dest)
        if collected is self.default:
            collected = []
        setattr(namespace, self.dest, [*collected, value])


def add_ignore(parser: argparse.ArgumentParser) -> None:
    """Add `--ignore PATTERN`; with one value per use, it cannot swallow positional arguments."""
    parser.add_argument(
        "--ignore",
        action=PatternAction,
        default=["lm_head"],
        metavar="PATTERN",
        help=(
            "modules in full precision: a name, or re: and a regular expression; repeatable "
            "(default: lm_head)"
        ),
    )


def add_scheme(parser: argparse.ArgumentParser, note: str = "", **options: Any) -> None:
    """Add `--scheme`, for `read_formats`."""
    from trl_qurl.quantization.formats import EXAMPLE, SCHEMES, UNQUANTIZED

    text = (
        f"{', '.join(SCHEMES)}, or {UNQUANTIZED} for 16 bits; or a JSON object of formats by "
        f"pattern, of which the first match wins: '{EXAMPLE}'{note}"
    )
    parser.add_argument("--scheme", **{"metavar": "FORMAT", "help": text} | options)


def check_hub(name: str, kind: str) -> None:
    """Ask the Hub once about a model or dataset, because libraries retry for long.

    Raises `ConnectionError` if the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    if Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)).is_dir():
        return
    if constants.HF_HUB_OFFLINE and kind == "dataset":  # that library has a cache of its own
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=10)
    except (HfHubHTTPError, HFValidationError):
        pass  # a wrong name, or one without access: loading it says so
    except Exception as error:  # of the HTTP library
        raise ConnectionError(
            f"{name} is not a local {kind}, and the Hub cannot be reached ({error}): check the "
            "name and the network, give a local path, or set HF_HUB_OFFLINE=1 to use what was "
            "downloaded before."
        ) from None


def check_model(name_or_path: str) -> None:
    """Raise if a local directory holds no model, or the Hub is out of reach."""
    if not is_local(name_or_path):
        check_hub(name_or_path, "model")
        return
    merge = f"peft.AutoPeftModelForCausalLM.from_pretrained({name_or_path!r}).merge_and_unload()"
    check_model_directory(
        name_or_path,
        f"merge it into its base first with {merge}.save_pretrained('merged'), or train with "
        "--save_quantized, the only way for an adapter of round_base=True",
    )
